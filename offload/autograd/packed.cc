#include "offload/autograd/packed.h"

#include "offload/base/interpreter.h"
#include "offload/saving/runtime.h"
#include "offload/tensors/deferred_copies.h"
#include "offload/tensors/lent_tensor.h"

namespace ebb {

Packed::Packed(const at::Tensor& tensor, const GuardScope::Target& target, RegionSaves* region) {
  Runtime& runtime = *target.runtime;
  runtime.check_process();
  DeferredCopies::of_this_thread().start_finished();
  if (const std::optional<KeptReason> reason = runtime.passed_through(tensor)) {
    runtime.count_kept(*reason, tensor);
    if (reason == KeptReason::kPolicy) {
      held_.emplace(runtime.residency().ledger().hold(tensor.storage().nbytes(), runtime.decider().passed_through()));
    }
    saved_.emplace(tensor);
    return;
  }
  if (runtime.tier().captures()) {  // Note [CUDA graphs]
    runtime.count_kept(KeptReason::kCaptured, tensor);
    saved_.emplace(tensor);
    return;
  }
  const WithoutInterpreterLock without;  // Note [The interpreter's lock] in interpreter.h
  const HostRange range(runtime.residency().trace(), "pack", tensor.storage().nbytes());
  runtime_ = target.runtime;
  const std::shared_ptr<SavedStep> step = target.scope->step(target.runtime);
  if (region != nullptr) {
    saved_.emplace(tensor, runtime.keep(tensor, step, *region));
    return;
  }
  const auto start = tensor.grad_fn() == nullptr ? Runtime::Start::kWhenFilled : Runtime::Start::kNow;
  saved_.emplace(tensor, runtime.save(tensor, step, start));
}

Packed::~Packed() {
  const void* const save = &*saved_;
  saved_.reset();
  held_.reset();
  for (const c10::Storage& memory : sweep_lent_here(save)) {
    if (runtime_ != nullptr && !runtime_->forked()) {
      runtime_->residency().stash().release(memory);
    }
  }
}

at::Tensor Packed::unpack() {
  const WithoutInterpreterLock without;
  sweep_lent_behind();  // before memory is asked for
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
