#pragma once

#include <liburing.h>

#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "streams/disk/io_job.h"
#include "streams/disk/io_queue.h"
#include "streams/disk/io_slot.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// An I/O queue of one thread that keeps several chunks in flight by io_uring. A chunk whose submission the kernel
// refuses is moved by pread or pwrite on that thread: slower, and as exact.
class UringIo final : public IoQueue {
 public:
  // The number of chunks in flight; one more where a read was short after the next read had been started. With so
  // many, the disk reaches its rate (bench/results/h200/disk.json).
  static constexpr unsigned kDepth = 16;

  // Why this process may not use io_uring (an old kernel, a container that forbids it); no error (false) if it may.
  // The first call tries; later calls return its result.
  [[nodiscard]] static std::error_code refusal();

  // Throws std::system_error when io_uring is refused.
  UringIo(const SpillFile& file, const std::string& thread_name);
  ~UringIo() override { backlog_.close(); }

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

  static std::error_code probe();
  void work(const std::string& thread_name) noexcept;
  void start_chunks();
  bool start_one();
  void issue(IoSlot& slot);
  [[nodiscard]] bool submit(IoSlot& slot);
  [[nodiscard]] io_uring_cqe* wait();
  void finish_arrived();

  // Only the I/O thread uses the members before `thread_`.
  const int fd_;
  Ring ring_;
  io_uring_sqe* entry_ = nullptr;   // an entry that the kernel has refused, and that is still in the queue
  std::vector<IoSlot> slots_;       // kDepth, and one for a read that has arrived and is not yet hashed
  std::shared_ptr<IoJob> current_;  // the job whose chunks are being handed out
  unsigned busy_ = 0;               // slots whose chunks are in flight, or have arrived and are not finished

  std::jthread thread_;  // the last member: joined before the others go
};

}  // namespace ebb
