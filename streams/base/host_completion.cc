#include "streams/base/host_completion.h"

#include <utility>

namespace ebb {

void HostCompletion::finish(std::exception_ptr error) noexcept {
  // Notifies under the lock: a waiter that has seen `done_` may destroy this object at once.
  const MutexLock lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  finished_.notify_all();
}

void HostCompletion::synchronize() const {
  const MutexLock lock(mutex_);
  while (!done_) {
    mutex_.wait(finished_);
  }
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

}  // namespace ebb
