#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "offload/managed/host_copy.h"
#include "offload/managed/postponed_work.h"
#include "offload/optimizer/part_update.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

// A thread that does updates that were put off before anybody asks for them, one after the other. What has not begun by
// the end is left to who asks for it.
//
// Threads: every member may be called from any thread, but the destructor.
class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts the thread with the first update. Lets go of gradients whose copies are done. Throws c10::Error in a forked
  // child.
  void add(UpdateLater update);

 private:
  void run();

  const ProcessMark made_in_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<PostponedWork>> to_do_ EBB_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<HostCopy>> copies_ EBB_GUARDED_BY(mutex_);  // which may be under way
  bool ends_ EBB_GUARDED_BY(mutex_) = false;
  std::thread thread_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
