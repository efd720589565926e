#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/cache/residency.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

class AtHome;

// Work on managed storages that was put off until one of them is used next, such as an optimizer's update of a
// parameter, whose copies then hide behind what the program does until then.
//
// The work runs once, on the thread of that use or of run_ahead(), on the stream that was current when it was put off,
// and without gradients, autocast or modes. A work that has no target any more still writes to what else it takes, if
// the program has that, or throws where it would read the target; otherwise the work is dropped.
//
// Threads: every member may be called from any thread.
class PostponedWork {
 public:
  // `target`, whose storage the work does not keep alive, and `others`, which it does: as tensors with version counters
  // of their own. `home`: the bytes of all of them, in this order, where they are to be used at home; otherwise null.
  using Work = std::function<void(const at::Tensor& target, const std::vector<at::Tensor>& others, AtHome* home)>;

  // What has the bytes where the work is to use them, while it lives.
  struct Brought {
    std::shared_ptr<const void> on_device;
    std::shared_ptr<AtHome> at_home;
  };
  using Bring = std::function<Brought(const at::Tensor& target, const std::vector<at::Tensor>& others)>;

  // kRead: what the work writes to `others` depends on the target's values.
  enum class TargetUse : std::uint8_t { kWritten, kRead };

  PostponedWork(std::shared_ptr<Residency> residency, const at::Tensor& target, at::TensorList others, Bring bring,
                Work work, TargetUse target_use = TargetUse::kWritten);
  PostponedWork(const PostponedWork&) = delete;
  PostponedWork& operator=(const PostponedWork&) = delete;

  // To be called before a use on the calling thread and its current stream. Runs the work if that has not been done;
  // waits for it if another thread has begun it; orders the current stream behind it. Does nothing where the work
  // itself is what uses a storage.
  //
  // Throws what the work throws; the work then counts as done, as far as it came. Throws what Bring throws, such as
  // c10::OutOfMemoryError, and c10::Error where the target has ended and would be read, before the work has begun: the
  // next use tries again.
  void before_use();

  // Runs the work if that has not been done, on a thread that uses nothing itself. What the work throws is kept for the
  // next before_use().
  void run_ahead() noexcept;

  // Lets go of what the work holds, if the work has not run and nobody else has the target or any of the others.
  // Returns whether it has.
  bool drop_if_unseen();

  // Whether the target has ended before the work has run; whether before_use() has nothing to do any more, on whatever
  // stream.
  [[nodiscard]] bool has_lost_target() const { return !has_run_ && target_storage_.expired(); }
  [[nodiscard]] bool is_over() const { return is_over_; }

 private:
  struct Held {
    Bring bring;
    Work work;
    std::vector<at::Tensor> others;
    at::Tensor target;  // while the work runs
  };

  void run_locked(Held& held) EBB_REQUIRES(mutex_);

  const std::shared_ptr<Residency> residency_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> target_storage_;
  const at::Tensor target_;  // without its bytes
  const TargetUse target_use_;
  const c10::Stream stream_;
  std::atomic<bool> has_run_{false};
  std::atomic<bool> is_over_{false};

  Mutex mutex_;                                      // held while the work runs
  Held held_ EBB_GUARDED_BY(mutex_);                 // empty once the work has begun
  Ticket done_ EBB_GUARDED_BY(mutex_);               // of what the work has given to stream_
  std::exception_ptr error_ EBB_GUARDED_BY(mutex_);  // of run_ahead(), until somebody has it
};

}  // namespace ebb
