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

  // Waits for a job. Null when the backlog is closed and empty.
  [[nodiscard]] std::shared_ptr<IoJob> pop();

  // Null when no job is there right now.
  [[nodiscard]] std::shared_ptr<IoJob> try_pop();

  // Says that no job will follow; jobs that are here are still handed out.
  void close() noexcept;

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<IoJob>> jobs_ EBB_GUARDED_BY(mutex_);
  bool closed_ EBB_GUARDED_BY(mutex_) = false;
};

}  // namespace ebb
