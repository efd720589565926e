#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "streams/base/disk_io.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "streams/disk/io_job.h"
#include "streams/disk/io_slot.h"
#include "streams/disk/spill_file.h"

namespace ebb {

class UringIo;

// One lane between memory and a spill file: takes requests from any thread and carries them out on threads of its own.
// These are one thread that keeps several chunks in flight by io_uring (UringIo), or a few that call pread and pwrite,
// each with one chunk at a time, which work wherever files do.
//
// Ordering: requests START in the order in which they were submitted, each when the tickets in its `after` are done,
// and finish in any order. Queues may wait for one another's tickets: a ticket exists before it can be waited for, so
// that the waits form no circle, and a queue that waits still completes what it started.
//
// Errors: std::system_error for what the system refuses, thrown by the ticket's synchronize (a failed transfer names
// the bytes, the offset and the folder); SpillCorrupted, in the same way, for a read whose bytes are not those that
// the chunk was last written with (Note [Checked chunks] in io_slot.h); c10::Error from submit for a request that
// breaks IoRequest's rules.
class IoQueue {
 public:
  // `file` must outlive the queue. `thread_name`: the name of the queue's threads, at most 15 characters. Throws
  // std::system_error when the engine is not available.
  IoQueue(DiskIo engine, const SpillFile& file, const std::string& thread_name);

  // First carries out all requests that were submitted, so the tickets in `after` must all be done sooner or later.
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // Never blocks on a transfer.
  Ticket submit(IoRequest request);

  // For the queue's own threads: starts the next chunk in a slot, which must be idle. kYes: waits for a request and its
  // gates; kNo: starts nothing where this would block. False if nothing was started: with kYes, when the queue is being
  // destroyed and everything has been started.
  enum class Wait : bool { kNo, kYes };
  bool start_next(IoSlot& slot, Wait wait);

 private:
  void start_thread(const std::string& name, std::function<void()> work);
  void close() noexcept;

  // Held while waiting for a request and for its gates: one thread waits for all, and the other threads finish their
  // chunks and then wait for this lock. The lock keeps requests in order.
  Mutex next_mutex_ EBB_ACQUIRED_BEFORE(mutex_);
  std::shared_ptr<IoJob> current_ EBB_GUARDED_BY(next_mutex_);  // the job whose chunks are being handed out

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<IoJob>> waiting_ EBB_GUARDED_BY(mutex_);  // jobs that have not started, in order
  bool closed_ EBB_GUARDED_BY(mutex_) = false;                         // no job will follow

  std::unique_ptr<UringIo> uring_;     // null where threads call pread and pwrite
  std::vector<std::jthread> threads_;  // the last member: joined before the others go
};

}  // namespace ebb
