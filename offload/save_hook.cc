#include "offload/save_hook.h"

#include <utility>

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

}  // namespace

void SaveHook::call_pack_hook(const at::Tensor& tensor) {
  const Scope::Target target = std::exchange(target_, {});
  Core& core = *target.core;
  core.check_process();
  PutOff::of_this_thread().start_finished();
  version_.emplace(tensor);
  if (const std::optional<Kept> reason = core.never_moved(tensor)) {
    core.count_kept(*reason, tensor);
    tensor_ = tensor.is_leaf() ? tensor : tensor.tensor_data();
    return;
  }
  const auto start = tensor.grad_fn() == nullptr ? Core::Start::kWhenFilled : Core::Start::kNow;
  use_.emplace(core.save(tensor, target.scope->tape(core), start));
  tensor_ = with_storage(tensor, core.no_bytes());
}

at::Tensor SaveHook::call_unpack_hook() {
  version_->check(tensor_);
  return use_ ? with_storage(tensor_, use_->get()) : tensor_;
}

}  // namespace ebb
