#include "offload/autograd/save_hook.h"

#include "offload/base/autograd_info.h"
#include "offload/base/backward_pass.h"
#include "offload/base/interpreter.h"
#include "offload/recompute/operation_log.h"
#include "offload/saving/runtime.h"
#include "offload/tensors/deferred_copies.h"
#include "offload/tensors/lent_tensor.h"

namespace ebb {

void SaveHook::call_pack_hook(const at::Tensor& tensor) {
  const GuardScope::Target target = std::exchange(target_, {});
  const OfRegion of_region = std::exchange(of_region_, nullptr);
  MakeRecipe make_recipe = of_region == nullptr ? nullptr : of_region(tensor);
  if (target.runtime == nullptr) {
    saved_.emplace(tensor);
    return;
  }
  Runtime& runtime = *target.runtime;
  runtime.check_process();
  DeferredCopies::of_this_thread().start_finished();
  const AutogradInfo info(tensor);
  std::optional<KeptReason> reason = runtime.exclusions().reason(tensor, info);
  if (!reason && runtime.tier().captures()) {
    reason = KeptReason::kCaptured;  // Note [CUDA graphs]
  }
  if (reason) {
    if (std::optional<DeviceAccount::Held> held = runtime.pass_through(tensor, *reason)) {
      held_.emplace(*std::move(held));
    }
    saved_.emplace(tensor, info);
    log(tensor, info);
    return;
  }
  const WithoutInterpreterLock without;  // Note [The interpreter's lock] in interpreter.h
  const HostRange range(runtime.residency().trace(), "pack", tensor.storage().nbytes());
  runtime_ = target.runtime;
  const std::shared_ptr<SavedStep> step = target.scope->step(target.runtime);
  const bool is_filled = info.grad_fn() != nullptr;  // Note [Saved before it is filled] in deferred_copies.h
  saved_.emplace(tensor, info, runtime.save(tensor, step, is_filled, std::move(make_recipe)));
  log(tensor, info);
}

void SaveHook::log(const at::Tensor& tensor, const AutogradInfo& info) {
  if (OperationLog* const log = OperationLog::here(); log != nullptr && !in_backward()) {
    logged_ = log->saved(tensor, info, saved_->shared_storage());
  }
}

SaveHook::~SaveHook() {
  if (!saved_) {
    return;
  }
  const void* const save = &*saved_;
  logged_.reset();  // refers to the tensor, too
  saved_.reset();
  held_.reset();
  for (const c10::Storage& memory : sweep_lent(save)) {
    if (runtime_ != nullptr && !runtime_->forked()) {
      runtime_->residency().stash().release(memory);
    }
  }
}

at::Tensor SaveHook::call_unpack_hook() {
  const WithoutInterpreterLock without;
  sweep_lent();  // before memory is asked for
  for (bool is_again = false;; is_again = true) {
    try {
      return saved_->get();
    } catch (const c10::OutOfMemoryError&) {
      if (runtime_ == nullptr || (runtime_->evict(saved_->storage()->bytes()) == 0 && is_again)) {
        throw;
      }
    }
  }
}

}  // namespace ebb
