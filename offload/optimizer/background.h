#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "offload/managed/postponed_work.h"
#include "streams/base/mutex.h"

namespace ebb {

// A thread that does postponed work before anybody asks for it, one after the other. What has not begun by the end is
// left to who asks for it.
//
// Threads: every member may be called from any thread, but the destructor.
class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts the thread with the first work.
  void add(std::shared_ptr<PostponedWork> work);

 private:
  void run();

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PostponedWork>> to_do_ EBB_GUARDED_BY(mutex_);
  bool ends_ EBB_GUARDED_BY(mutex_) = false;
  std::thread thread_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
