#include "offload/saving/exclusions.h"

#include "offload/base/managed_key.h"

namespace ebb {
namespace {

// Whether the tensor is one strided range of one storage, and its TensorImpl stands for nothing else.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched,
                                          c10::DispatchKey::Functionalize});
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() &&
         !tensor.key_set().has_any(kWrapped) && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() != nullptr;
}

bool is_trained_leaf(const AutogradInfo& info) { return info.is_leaf() && info.requires_grad(); }

}  // namespace

void Exclusions::add(const at::Tensor& tensor) {
  if (tensor.defined() && is_plain(tensor)) {
    excluded_.insert(tensor.storage());
  }
}

std::optional<KeptReason> Exclusions::reason(const at::Tensor& tensor, const AutogradInfo& info) {
  if (!is_plain(tensor)) {
    return KeptReason::kUnmovable;
  }
  if (tensor.device() != device_) {
    return KeptReason::kOtherDevice;
  }
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() == 0) {
    return KeptReason::kEmpty;
  }
  if (is_managed(tensor)) {  // the bytes come and go by themselves
    return is_parameter(tensor, info) ? KeptReason::kParameter : KeptReason::kExcluded;
  }
  if (storage.data() == nullptr) {  // a ZeroTensor has sizes and no memory
    return KeptReason::kUnmovable;
  }
  if (is_parameter(tensor, info)) {
    return KeptReason::kParameter;
  }
  if (excluded_.contains(storage)) {
    return KeptReason::kExcluded;
  }
  if (storage.data_ptr().get_context() == nullptr) {  // LibTorch does not own the memory, and could not free it
    return KeptReason::kNonOwning;
  }
  return storage.nbytes() < least_bytes_ ? std::optional(KeptReason::kPolicy) : std::nullopt;
}

bool Exclusions::is_parameter(const at::Tensor& tensor, const AutogradInfo& info) {
  bool found = is_trained_leaf(info);
  if (info.is_view()) {
    // A view of an activation that was made without gradients (in a function's forward, say) looks like a trained leaf.
    const AutogradInfo base(tensor._base());
    found = is_trained_leaf(base) || (found && base.is_leaf());
  }
  if (found) {
    parameters_.insert(tensor.storage());
    return true;
  }
  return parameters_.contains(tensor.storage());
}

}  // namespace ebb
