#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "streams/base/ticket.h"
#include "streams/disk/io_backlog.h"
#include "streams/disk/io_request.h"
#include "streams/disk/spill_file.h"

namespace ebb {

enum class IoEngine : std::uint8_t {
  kAuto,     // io_uring where the kernel permits it, else threads
  kUring,    // io_uring, or an error
  kThreads,  // a few threads that call pread and pwrite
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
  [[nodiscard]] static std::unique_ptr<IoQueue> make(IoEngine engine, const SpillFile& file,
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
