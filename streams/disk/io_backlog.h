#pragma once

#include <condition_variable>
#include <deque>
#include <memory>

#include "streams/base/mutex.h"
#include "streams/disk/io_job.h"

namespace ebb {

// The jobs of one I/O queue that have not started, first in, first out.
//
// Threads: every member may be called from any thread.
class IoBacklog {
 public:
  // Requires that the backlog is not closed.
  void push(std::shared_ptr<IoJob> job);

  // kYes: waits for a job, unless the backlog is closed. Null when no job is there.
  enum class Wait : bool { kNo, kYes };
  [[nodiscard]] std::shared_ptr<IoJob> pop(Wait wait);

  // Says that no job will follow; jobs that are here are still handed out.
  void close() noexcept;

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<IoJob>> jobs_ EBB_GUARDED_BY(mutex_);
  bool closed_ EBB_GUARDED_BY(mutex_) = false;
};

}  // namespace ebb
