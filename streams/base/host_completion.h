#pragma once

#include <condition_variable>
#include <exception>

#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

// A ticket that is done when a host thread calls finish: the ticket of a disk request.
//
// Threads: every member may be called from any thread. The maker keeps a non-const pointer, and must call finish
// exactly once: threads may be blocked in synchronize until then.
// Memory ordering: what happened before finish is visible after synchronize, and after done has returned true.
class HostCompletion : public Completion {
 public:
  // `error`: what synchronize throws from now on; null for success. Requires that finish was not called before.
  void finish(std::exception_ptr error) noexcept;

  [[nodiscard]] bool done() const noexcept override {
    const MutexLock lock(mutex_);
    return done_;
  }
  void synchronize() const override;

 private:
  mutable Mutex mutex_;
  mutable std::condition_variable finished_;
  bool done_ EBB_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
