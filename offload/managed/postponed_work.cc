#include "offload/managed/postponed_work.h"

#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ScopeExit.h>

#include "offload/interpreter.h"
#include "streams/base/tier.h"

namespace ebb {

WeakAlias::WeakAlias(const at::Tensor& tensor)
    : storage_(tensor.storage().getWeakStorageImpl()),
      keys_(tensor.key_set()),
      dtype_(tensor.dtype()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      offset_(tensor.storage_offset()) {}

std::optional<at::Tensor> WeakAlias::lock() const {
  const c10::intrusive_ptr<c10::StorageImpl> storage = storage_.lock();
  if (storage == nullptr) {
    return std::nullopt;
  }
  auto alias = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), keys_, dtype_);
  alias->set_sizes_and_strides(sizes_, strides_, offset_);
  return at::Tensor(std::move(alias));
}

PostponedWork::PostponedWork(std::shared_ptr<Residency> residency, const at::Tensor& target, Work work)
    : residency_(std::move(residency)),
      target_(target),
      stream_(residency_->tier().current_stream()),
      work_(std::move(work)) {}

void PostponedWork::before_use() {
  if (is_over_ || runner_ == std::this_thread::get_id()) {
    return;
  }
  const WithoutInterpreterLock without;  // the work may be written in Python
  const MutexLock lock(mutex_);
  if (work_ != nullptr) {
    run_locked();
  }
  Tier& tier = residency_->tier();
  if (const c10::Stream stream = tier.current_stream(); stream != stream_) {
    tier.wait(WaitPoint::kUseAfterPostponed, stream, done_);
  }
  is_over_ = is_done(done_);
}

void PostponedWork::drop_if_ended() {
  Work dropped;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (work_ != nullptr && target_.has_ended()) {
    dropped = std::exchange(work_, nullptr);
    has_run_ = true;
    is_over_ = true;
  }
}

void PostponedWork::run_locked() {
  const Work work = std::exchange(work_, nullptr);
  runner_ = std::this_thread::get_id();
  const auto leave = c10::make_scope_exit([&] {
    runner_ = std::thread::id();
    has_run_ = true;
  });
  const std::optional<at::Tensor> target = target_.lock();
  if (!target) {
    return;
  }
  const at::ThreadLocalStateGuard as_then(state_);
  const c10::StreamGuard there(stream_);
  try {
    work(*target);
  } catch (...) {
    done_ = residency_->tier().record(stream_);  // of what the work has begun
    throw;
  }
  done_ = residency_->tier().record(stream_);
}

}  // namespace ebb
