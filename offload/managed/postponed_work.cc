#include "offload/managed/postponed_work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "offload/base/interpreter.h"
#include "offload/base/references.h"
#include "streams/base/tier.h"

namespace ebb {
namespace {

thread_local const PostponedWork* running_here = nullptr;  // on the calling thread

// A tensor over another storage, with a version counter of its own.
at::Tensor like(const at::Tensor& tensor, c10::Storage storage) {
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKey::Python);  // which may not know such a tensor
  auto made = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                    /*allow_tensor_metadata_change=*/true);
  made->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(std::move(made));
}

}  // namespace

PostponedWork::PostponedWork(std::shared_ptr<Residency> residency, const at::Tensor& target, at::TensorList others,
                             Bring bring, Work work, TargetUse target_use)
    : residency_(std::move(residency)),
      target_storage_(target.storage().getWeakStorageImpl()),
      target_(like(target, residency_->no_bytes())),
      bring_(bring),
      target_use_(target_use),
      stream_(residency_->tier().current_stream()),
      held_{std::move(work), {}} {
  for (const at::Tensor& other : others) {
    held_.tensors.push_back(other.variable_data());
  }
}

void PostponedWork::before_use() {
  if (is_over_ || running_here == this) {
    return;
  }
  Held held;                             // destroyed after the lock is released: other people's code may run then
  const WithoutInterpreterLock without;  // which the work may take
  const MutexLock lock(mutex_);
  if (!has_run_) {
    run_locked(held);
  }
  if (error_ != nullptr) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
  Tier& tier = residency_->tier();
  if (const c10::Stream stream = tier.current_stream(); stream != stream_) {
    tier.wait(WaitPoint::kUseAfterPostponed, stream, done_);
  }
  is_over_ = is_done(done_);
}

void PostponedWork::run_ahead() noexcept {
  Held held;  // as in before_use
  const WithoutInterpreterLock without;
  const MutexLock lock(mutex_);
  if (has_run_) {
    return;
  }
  try {
    run_locked(held);
  } catch (...) {
    error_ = has_run_ ? std::current_exception() : nullptr;  // what has not begun is tried again
  }
}

void PostponedWork::run_locked(Held& held) {
  const auto leave = c10::make_scope_exit([before = std::exchange(running_here, this)] { running_here = before; });
  // The calling thread's state is that of a new thread, without gradients.
  const c10::InferenceMode no_inference(false);
  const c10::impl::ForceDispatchKeyGuard no_modes(c10::default_included_set, c10::default_excluded_set);
  const at::NoGradGuard no_grad;
  const c10::StreamGuard there(stream_);
  const c10::intrusive_ptr<c10::StorageImpl> storage = target_storage_.lock();
  TORCH_CHECK(target_use_ == TargetUse::kWritten || storage,
              "ebb: an optimizer's state was to be updated with its parameter's values (weight decay) at its next use, "
              "and the parameter has ended since: use the state before");
  held.tensors.push_back(storage ? like(target_, c10::Storage(storage))
                                 : at::empty_strided(target_.sizes(), target_.strides(), target_.options()));
  held.tensors.insert(held.tensors.end(), held_.tensors.begin(), held_.tensors.end());
  const std::shared_ptr<const Tensors> brought = bring_(held.tensors);
  held.work = std::exchange(held_.work, nullptr);
  held_.tensors.clear();
  has_run_ = true;
  try {
    held.work(*brought, /*has_target=*/storage.defined());
  } catch (...) {
    done_ = residency_->tier().record(stream_);  // of what the work has begun
    throw;
  }
  done_ = residency_->tier().record(stream_);
}

bool PostponedWork::drop_if_unseen() {
  Held dropped;  // destroyed after the lock is released
  const WithoutInterpreterLock without;
  const MutexLock lock(mutex_);
  const auto is_seen = [](const at::Tensor& other) { return references_to(other.storage()) > 1; };
  if (!has_lost_target() || std::ranges::any_of(held_.tensors, is_seen)) {
    return false;
  }
  dropped = std::exchange(held_, {});
  has_run_ = true;
  is_over_ = true;
  return true;
}

}  // namespace ebb
