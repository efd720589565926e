#include "streams/disk/io_queue.h"

#include <system_error>
#include <utility>

#include <c10/util/Exception.h>

#include "streams/base/aligned_memory.h"
#include "streams/disk/thread_io.h"
#include "streams/disk/uring_io.h"

namespace ebb {

void IoBacklog::push(std::shared_ptr<IoJob> job) {
  const MutexLock lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_one();
}

std::shared_ptr<IoJob> IoBacklog::pop(Wait wait) {
  const MutexLock lock(mutex_);
  while (wait == Wait::kYes && !closed_ && jobs_.empty()) {
    mutex_.wait(changed_);
  }
  if (jobs_.empty()) {
    return nullptr;
  }
  std::shared_ptr<IoJob> first = std::move(jobs_.front());
  jobs_.pop_front();
  return first;
}

void IoBacklog::close() noexcept {
  const MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

std::unique_ptr<IoQueue> IoQueue::make(DiskIo engine, const SpillFile& file, const std::string& thread_name) {
  if (engine == DiskIo::kThreads) {  // io_uring is not even tried: a sandbox may end the process for the attempt
    return std::make_unique<ThreadIo>(file, thread_name);
  }
  const std::error_code refusal = UringIo::refusal();
  if (engine == DiskIo::kUring && refusal) {
    throw std::system_error(refusal, "io_uring was asked for, but this process may not use it");
  }
  if (!refusal) {
    try {
      return std::make_unique<UringIo>(file, thread_name);
    } catch (const std::system_error&) {  // io_uring is permitted, but the system makes no more rings
      if (engine == DiskIo::kUring) {
        throw;
      }
    }
  }
  return std::make_unique<ThreadIo>(file, thread_name);
}

Ticket IoQueue::submit(IoRequest request) {
  TORCH_CHECK(request.bytes > 0 && request.memory != nullptr, "cannot queue a transfer of ", request.bytes,
              " bytes of memory at ", request.memory);
  TORCH_CHECK(request.file_offset % kPageBytes == 0, "cannot queue a transfer at offset ", request.file_offset,
              " of the spill file: not a multiple of ", kPageBytes, " bytes");
  auto job = std::make_shared<IoJob>(std::move(request));
  Ticket ticket = job->ticket();
  backlog_.push(std::move(job));
  return ticket;
}

}  // namespace ebb
