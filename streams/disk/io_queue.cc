#include "streams/disk/io_queue.h"

#include <pthread.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include <c10/util/Exception.h>

#include "streams/base/aligned_memory.h"
#include "streams/base/fault_point.h"
#include "streams/disk/uring_io.h"

namespace ebb {

IoQueue::IoQueue(DiskIo engine, const SpillFile& file, const std::string& thread_name) {
  if (engine != DiskIo::kThreads) {  // else io_uring is not even tried: a sandbox may end the process for the attempt
    const std::error_code refusal = UringIo::refusal();
    if (engine == DiskIo::kUring && refusal) {
      throw std::system_error(refusal, "io_uring was asked for, but this process may not use it");
    }
    try {
      if (!refusal) {
        uring_ = std::make_unique<UringIo>(file, *this);
        start_thread(thread_name, [this] { uring_->run(); });
        return;
      }
    } catch (const std::system_error&) {  // io_uring is permitted, but the system makes no more rings
      if (engine == DiskIo::kUring) {
        throw;
      }
      uring_ = nullptr;
    }
  }
  try {
    constexpr int kThreads = 8;
    for (int i = 0; i < kThreads; ++i) {
      start_thread(thread_name, [this, &file] {
        IoSlot slot(file);
        while (start_next(slot, Wait::kYes)) {
          slot.finish_blocking();
        }
      });
    }
  } catch (...) {  // the system has no more threads: the threads that run must end, so that they can be joined
    close();
    throw;
  }
}

IoQueue::~IoQueue() { close(); }

void IoQueue::start_thread(const std::string& name, std::function<void()> work) {
  if (fails(FaultPoint::kThreadStart)) {
    throw std::system_error(EAGAIN, std::generic_category(), "cannot start a thread");
  }
  threads_.emplace_back([name, work = std::move(work)]() noexcept {
    ::pthread_setname_np(::pthread_self(), name.c_str());
    work();
  });
}

void IoQueue::close() noexcept {
  const MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

Ticket IoQueue::submit(IoRequest request) {
  TORCH_CHECK(request.bytes > 0 && request.memory != nullptr, "cannot queue a transfer of ", request.bytes,
              " bytes of memory at ", request.memory);
  TORCH_CHECK(request.file_offset % kPageBytes == 0, "cannot queue a transfer at offset ", request.file_offset,
              " of the spill file: not a multiple of ", kPageBytes, " bytes");
  auto job = std::make_shared<IoJob>(std::move(request));
  const MutexLock lock(mutex_);
  waiting_.push_back(job);
  changed_.notify_one();
  return job;
}

bool IoQueue::start_next(IoSlot& slot, Wait wait) {
  std::shared_ptr<IoJob> job;
  std::optional<IoChunk> chunk;
  {
    const MutexLock lock(next_mutex_);
    while (!chunk.has_value()) {
      if (current_ == nullptr) {
        const MutexLock waiting_lock(mutex_);
        while (wait == Wait::kYes && !closed_ && waiting_.empty()) {
          mutex_.wait(changed_);
        }
        if (waiting_.empty()) {
          return false;
        }
        current_ = std::move(waiting_.front());
        waiting_.pop_front();
      }
      if (wait == Wait::kNo && !current_->gates_done()) {
        return false;
      }
      job = current_;
      chunk = job->pass_gates() ? job->next_chunk() : std::nullopt;
      if (!chunk.has_value()) {
        current_.reset();
      }
    }
  }
  slot.start(std::move(job), *chunk);  // outside the lock: it may copy the chunk
  return true;
}

}  // namespace ebb
