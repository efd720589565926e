#pragma once

#include <liburing.h>

#include <system_error>
#include <vector>

#include "streams/disk/io_queue.h"
#include "streams/disk/io_slot.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// What the thread of an I/O queue does that keeps several chunks in flight by io_uring. A chunk whose submission the
// kernel refuses is moved by pread or pwrite on that thread: slower, and as exact.
//
// Threads: run by one thread, which alone uses the object then.
class UringIo {
 public:
  // The number of chunks in flight; one more where a read was short after the next read had been started. With so
  // many, the disk reaches its rate (bench/results/h200/disk.json).
  static constexpr unsigned kDepth = 16;

  // Why this process may not use io_uring (an old kernel, a container that forbids it); no error (false) if it may.
  // The first call tries; later calls return its result.
  [[nodiscard]] static std::error_code refusal();

  // Throws std::system_error when io_uring is refused.
  UringIo(const SpillFile& file, IoQueue& queue);

  // Carries out the queue's requests until the queue is being destroyed and everything is done.
  void run() noexcept;

 private:
  class Ring {
   public:
    Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring() { ::io_uring_queue_exit(&ring_); }
    [[nodiscard]] io_uring* get() { return &ring_; }

   private:
    io_uring ring_{};
  };

  void start_chunks();
  bool start_one();
  void issue(IoSlot& slot);
  [[nodiscard]] io_uring_cqe* wait();
  void finish_arrived();

  IoQueue& queue_;
  const int fd_;
  Ring ring_;
  io_uring_sqe* entry_ = nullptr;  // an entry that the kernel has refused, and that is still in the queue
  std::vector<IoSlot> slots_;      // kDepth, and one for a read that has arrived and is not yet hashed
  unsigned busy_ = 0;              // slots whose chunks are in flight, or have arrived and are not finished
};

}  // namespace ebb
