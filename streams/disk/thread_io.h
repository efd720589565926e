#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "streams/base/mutex.h"
#include "streams/disk/io_job.h"
#include "streams/disk/io_queue.h"
#include "streams/disk/io_slot.h"
#include "streams/disk/spill_file.h"

namespace ebb {

// An I/O queue of threads that call pread and pwrite, each with one chunk at a time. Works wherever files do.
class ThreadIo final : public IoQueue {
 public:
  ThreadIo(const SpillFile& file, const std::string& thread_name);
  ~ThreadIo() override { backlog_.close(); }

 private:
  static constexpr int kThreads = 8;

  void work(const SpillFile& file, const std::string& thread_name) noexcept;
  bool start_next(IoSlot& slot);

  // Held while waiting for a request and for its gates: one worker waits for all, and the other workers finish their
  // chunks and then wait for this lock. The lock keeps requests in order.
  Mutex next_mutex_;
  std::shared_ptr<IoJob> current_ EBB_GUARDED_BY(next_mutex_);  // the job whose chunks are being handed out

  std::vector<std::jthread> threads_;  // the last member: joined before the others go
};

}  // namespace ebb
