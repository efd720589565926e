#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "streams/base/disk_io.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "streams/disk/io_job.h"
#include "streams/disk/spill_file.h"

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

// One lane between memory and a spill file: takes requests from any thread and carries them out on threads of its own.
//
// Ordering: requests START in the order in which they were submitted, each when the tickets in its `after` are done,
// and finish in any order. Queues may wait for one another's tickets: a ticket exists before it can be waited for, so
// that the waits form no circle, and a queue that waits still completes what it started.
//
// Errors: std::system_error for what the system refuses, thrown by the ticket's synchronize (a failed transfer names
// the bytes, the offset and the folder); SpillCorrupted, in the same way, for a read whose bytes are not those that
// the chunk was last written with (Note [Checked chunks] in io_slot.h); c10::Error from submit for a request that
// breaks IoRequest's rules.
//
// The destructor of every implementation first carries out all requests that were submitted, so the tickets in `after`
// must all be done sooner or later. It never throws. The file must outlive the queue.
class IoQueue {
 public:
  // `thread_name`: the name of the queue's threads, at most 15 characters. Throws std::system_error when the engine
  // is not available.
  [[nodiscard]] static std::unique_ptr<IoQueue> make(DiskIo engine, const SpillFile& file,
                                                     const std::string& thread_name);

  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  virtual ~IoQueue() = default;

  // Never blocks on a transfer.
  Ticket submit(IoRequest request);

 protected:
  IoQueue() = default;

  IoBacklog backlog_;
};

}  // namespace ebb
