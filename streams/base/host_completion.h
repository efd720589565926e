#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <utility>

#include "streams/base/ticket.h"

namespace ebb {

// A ticket that is done when a host thread calls finish: the ticket of a disk request.
//
// Threads: every member may be called from any thread. The maker keeps a non-const pointer, and must call finish
// exactly once: threads may be blocked in synchronize until then.
// Memory ordering: what happened before finish is visible after synchronize, and after done has returned true.
class HostCompletion : public Completion {
 public:
  // `error`: what synchronize throws from now on; null for success. Requires that finish was not called before, and
  // that the caller shares the ticket until finish has returned.
  void finish(std::exception_ptr error) noexcept {
    if (error == nullptr) {
      promise_.set_value();
    } else {
      promise_.set_exception(std::move(error));
    }
  }

  [[nodiscard]] bool done() const noexcept override {
    return finished_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronize() const override { finished_.get(); }

 private:
  std::promise<void> promise_;
  const std::shared_future<void> finished_{promise_.get_future()};
};

}  // namespace ebb
