#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/residency/residency.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

// Another tensor over a tensor's storage, which does not keep the storage alive.
class WeakAlias {
 public:
  explicit WeakAlias(const at::Tensor& tensor);

  [[nodiscard]] bool has_ended() const { return storage_.expired(); }

  // A tensor with a version counter of its own; nullopt if the storage has ended.
  [[nodiscard]] std::optional<at::Tensor> lock() const;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  std::int64_t offset_;
};

// Work on managed storages that was put off until one of them is used next, such as an optimizer's update of a
// parameter, whose copies then hide behind what the program does until then.
//
// The work runs once, in the state and on the stream of the thread that put it off: grad mode, autocast and the like
// are those of that time. The work does not keep its target alive, and is dropped where the target has ended. All else
// that the work holds stays alive until the work has run.
//
// Threads: every member may be called from any thread.
class PostponedWork {
 public:
  // `work` gets an alias of the target.
  using Work = std::function<void(const at::Tensor& target)>;

  PostponedWork(std::shared_ptr<Residency> residency, const at::Tensor& target, Work work);
  PostponedWork(const PostponedWork&) = delete;
  PostponedWork& operator=(const PostponedWork&) = delete;

  // To be called before a use on the calling thread and its current stream. Runs the work if that has not been done;
  // waits for it if another thread has begun it; orders the current stream behind it. Does nothing where the work
  // itself is what uses a storage. Throws what the work throws, to the caller that has run it: the work is then over,
  // too.
  void before_use();

  // Lets go of what the work holds, if the work has not run and its target has ended.
  void drop_if_ended();

  // Whether the target has ended before the work has run; whether the work has run, or was dropped; whether
  // before_use() has nothing to do any more, on whatever stream.
  [[nodiscard]] bool has_ended() const { return !has_run_ && target_.has_ended(); }
  [[nodiscard]] bool has_run() const { return has_run_; }
  [[nodiscard]] bool is_over() const { return is_over_; }

 private:
  void run_locked() EBB_REQUIRES(mutex_);

  const std::shared_ptr<Residency> residency_;
  const WeakAlias target_;
  const at::ThreadLocalState state_;
  const c10::Stream stream_;
  std::atomic<std::thread::id> runner_{};
  std::atomic<bool> has_run_{false};
  std::atomic<bool> is_over_{false};

  Mutex mutex_;                         // held while the work runs
  Work work_ EBB_GUARDED_BY(mutex_);    // null once the work has begun
  Ticket done_ EBB_GUARDED_BY(mutex_);  // of what the work has given to stream_
};

}  // namespace ebb
