#include "streams/disk/thread_io.h"

#include <pthread.h>

#include <cerrno>
#include <system_error>

#include "streams/base/fault_point.h"

namespace ebb {

ThreadIo::ThreadIo(const SpillFile& file, const std::string& thread_name) {
  try {
    for (int i = 0; i < kThreads; ++i) {
      if (fails(FaultPoint::kThreadStart)) {
        throw std::system_error(EAGAIN, std::generic_category(), "cannot start a thread");
      }
      threads_.emplace_back([this, &file, thread_name] { work(file, thread_name); });
    }
  } catch (...) {  // the system has no more threads: the threads that run must end, so that they can be joined
    backlog_.close();
    throw;
  }
}

void ThreadIo::work(const SpillFile& file, const std::string& thread_name) noexcept {
  ::pthread_setname_np(::pthread_self(), thread_name.c_str());
  IoSlot slot(file);
  while (start_next(slot)) {
    slot.finish_blocking();
  }
}

// False when the queue is being destroyed and everything has been started.
bool ThreadIo::start_next(IoSlot& slot) {
  std::shared_ptr<IoJob> job;
  std::optional<IoChunk> chunk;
  {
    const MutexLock lock(next_mutex_);
    while (!chunk.has_value()) {
      if (current_ == nullptr) {
        current_ = backlog_.pop(IoBacklog::Wait::kYes);
        if (current_ == nullptr) {
          return false;
        }
      }
      if (current_->pass_gates()) {
        chunk = current_->next_chunk();
      }
      if (!chunk.has_value()) {
        current_.reset();
      }
    }
    job = current_;
  }
  slot.start(std::move(job), *chunk);  // outside the lock: it may copy the chunk
  return true;
}

}  // namespace ebb
