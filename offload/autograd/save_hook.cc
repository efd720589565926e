#include "offload/autograd/save_hook.h"

#include <utility>

#include "offload/autograd/core.h"
#include "offload/interpreter.h"
#include "offload/recompute/recipe_input.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/put_off.h"

namespace ebb {

SaveHook::~SaveHook() {
  std::shared_ptr<Residency> residency;
  if (anything_is_lent() && saved_ && saved_->storage() != nullptr) {
    residency = saved_->storage()->residency();
  }
  const void* const save = saved_ ? &*saved_ : nullptr;
  saved_.reset();
  held_.reset();
  for (const c10::Storage& memory : sweep_lent_here(save)) {
    if (residency != nullptr && !residency->forked()) {
      residency->stash().release(memory);
    }
  }
}

void SaveHook::call_pack_hook(const at::Tensor& tensor) {
  const Scope::Target target = std::exchange(target_, {});
  const std::shared_ptr<RegionSaves> region = std::exchange(region_, nullptr);
  Core& core = *target.core;
  core.check_process();
  PutOff::of_this_thread().start_finished();
  if (const std::optional<Kept> reason = core.passed_through(tensor)) {
    core.count_kept(*reason, tensor);
    if (reason == Kept::kPolicy) {
      held_.emplace(core.hold_passed_through(tensor.storage().nbytes()));
    }
    saved_.emplace(tensor);
    return;
  }
  if (core.tier().captures()) {  // Note [CUDA graphs] in save_hook.h
    core.count_kept(Kept::kCaptured, tensor);
    saved_.emplace(tensor);
    return;
  }
  const WithoutInterpreterLock without;  // Note [The interpreter's lock] in interpreter.h
  const HostRange range(core.trace(), "pack", tensor.storage().nbytes());
  const std::shared_ptr<Tape> tape = target.scope->tape(target.core);
  if (region != nullptr) {
    saved_.emplace(tensor, core.keep(tensor, tape, *region));
    return;
  }
  const auto start = tensor.grad_fn() == nullptr ? Core::Start::kWhenFilled : Core::Start::kNow;
  saved_.emplace(tensor, core.save(tensor, tape, start));
}

at::Tensor SaveHook::call_unpack_hook() {
  if (hand_to_recipe(*saved_)) {
    return saved_->shape();
  }
  const WithoutInterpreterLock without;
  sweep_lent_behind();  // before memory is asked for
  return saved_->get();
}

}  // namespace ebb
