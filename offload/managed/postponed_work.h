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
  using Tensors = std::vector<at::Tensor>;

  // `tensors`: the target and the others, as tensors with version counters of their own, or at home as use_at_home()
  // has them. `has_target`: false where the target has ended, and a tensor of its sizes stands in.
  using Work = std::function<void(const Tensors& tensors, bool has_target)>;

  // Has the bytes of the tensors where the work is to use them, as long as the result lives: on the device these
  // tensors themselves, which outlive the result.
  using Bring = std::shared_ptr<const Tensors> (*)(const Tensors& tensors);

  // kRead: what the work writes to `others` depends on the target's values.
  enum class TargetUse : std::uint8_t { kWritten, kRead };

  // The work does not keep the target's storage alive, and does keep the others'.
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
    Work work;
    Tensors tensors;  // destroyed first; the others, and while the work runs the target before them
  };

  void run_locked(Held& held) EBB_REQUIRES(mutex_);

  const std::shared_ptr<Residency> residency_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> target_storage_;
  const at::Tensor target_;  // without its bytes
  const Bring bring_;
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
