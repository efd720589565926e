#include "offload/save_hook.h"

#include <utility>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include "offload/core.h"
#include "offload/put_off.h"
#include "offload/recipe_input.h"

namespace ebb {
namespace {

// Whether a tensor may be kept as LibTorch keeps it: a node that saves its own output so would own itself for ever. The
// node that saves is the thread's newest, but for one of a custom function, whose forward may have made others since.
bool is_of_older_node(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  return node != nullptr && node->is_traceable() && node->sequence_nr() + 1 < at::sequence_number::peek();
}

// A view of a parameter is kept whole, as LibTorch keeps it: after a write it alone knows who made what it now shows
// (VersionCheck).
bool is_view_of_leaf_from_before(const at::Tensor& tensor) {
  return tensor.is_view() && tensor._base().is_leaf() && tensor.grad_fn() != nullptr &&
         tensor.grad_fn()->sequence_nr() + 1 < at::sequence_number::peek();
}

}  // namespace

void SaveHook::call_pack_hook(const at::Tensor& tensor) {
  const Scope::Target target = std::exchange(target_, {});
  const std::shared_ptr<RegionSaves> region = std::exchange(region_, nullptr);
  Core& core = *target.core;
  core.check_process();
  PutOff::of_this_thread().start_finished();
  VersionCheck version(tensor);
  if (const std::optional<Kept> reason = core.passed_through(tensor)) {
    core.count_kept(*reason, tensor);
    if (reason == Kept::kPolicy) {
      held_.emplace(core.hold_passed_through(tensor.storage().nbytes()));
    }
    // Detached from its history unless it is a leaf: an operation that saves its own output would own itself for ever.
    const bool whole = tensor.is_leaf() || is_of_older_node(tensor) || is_view_of_leaf_from_before(tensor);
    saved_.emplace(std::move(version), whole ? tensor : tensor.tensor_data());
    return;
  }
  const HostRange range(core.trace(), "pack", tensor.storage().nbytes());
  const std::shared_ptr<Tape> tape = target.scope->tape(core);
  if (region != nullptr) {
    saved_.emplace(std::move(version), tensor, core.keep(tensor, tape, *region));
    return;
  }
  const auto start = tensor.grad_fn() == nullptr ? Core::Start::kWhenFilled : Core::Start::kNow;
  saved_.emplace(std::move(version), tensor, core.save(tensor, tape, start));
}

at::Tensor SaveHook::call_unpack_hook() { return hand_to_recipe(*saved_) ? saved_->shape() : saved_->get(); }

}  // namespace ebb
