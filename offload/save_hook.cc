#include "offload/save_hook.h"

#include <utility>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include "offload/core.h"
#include "offload/put_off.h"

namespace ebb {
namespace {

// A second tensor over `storage` with every other property of `tensor`: sizes, strides, offset, dtype, conjugate and
// negative bits, and the version counter that it shares with the original.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage) {
  const c10::TensorImpl& original = *tensor.unsafeGetTensorImpl();
  auto copy = original.shallow_copy_and_detach(original.version_counter(), /*allow_tensor_metadata_change=*/true);
  copy->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(std::move(copy));
}

// A view of a parameter is kept whole, as LibTorch keeps it: after a write it alone knows who made what it now shows
// (VersionCheck). Not if the node that saves it also made it, for then they would own each other; that node is the
// thread's newest.
bool is_view_of_leaf_from_before(const at::Tensor& tensor) {
  return tensor.is_view() && tensor._base().is_leaf() && tensor.grad_fn() != nullptr &&
         tensor.grad_fn()->sequence_nr() + 1 < at::sequence_number::peek();
}

}  // namespace

void SaveHook::call_pack_hook(const at::Tensor& tensor) {
  const Scope::Target target = std::exchange(target_, {});
  Core& core = *target.core;
  core.check_process();
  PutOff::of_this_thread().start_finished();
  version_.emplace(tensor);
  if (const std::optional<Kept> reason = core.passed_through(tensor)) {
    core.count_kept(*reason, tensor);
    if (reason == Kept::kPolicy) {
      held_.emplace(core.hold_on_device(tensor.storage().nbytes()));
    }
    tensor_ = tensor.is_leaf() || is_view_of_leaf_from_before(tensor) ? tensor : tensor.tensor_data();
    return;
  }
  const HostRange range(core.trace(), "pack", tensor.storage().nbytes());
  const auto start = tensor.grad_fn() == nullptr ? Core::Start::kWhenFilled : Core::Start::kNow;
  use_.emplace(core.save(tensor, target.scope->tape(core), start));
  tensor_ = with_storage(tensor, core.no_bytes());
}

at::Tensor SaveHook::call_unpack_hook() {
  version_->check(tensor_);
  return use_ ? with_storage(tensor_, use_->get()) : tensor_;
}

}  // namespace ebb
