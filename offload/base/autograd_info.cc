#include "offload/base/autograd_info.h"

#include <cstring>
#include <typeinfo>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace ebb {
namespace {

const NodePtr kNone;

}  // namespace

bool is_custom(const torch::autograd::Node& node) {
  const char* const name = typeid(node).name();
  return std::strstr(name, "CppNode") != nullptr || std::strstr(name, "PyNode") != nullptr;
}

AutogradInfo::AutogradInfo(const at::TensorBase& tensor) : tensor_(tensor), grad_fn_(&kNone) {
  const auto* const meta = static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) {
    return;
  }
  // LibTorch's is_leaf() reads this field, too; grad_fn() would first bring a view's node up to date after a write.
  is_leaf_ = meta->grad_fn_ == nullptr;
  requires_grad_ = meta->requires_grad();  // virtual: a view requires a gradient where its base does
  output_nr_ = meta->output_nr_;
  is_view_ = meta->is_view_ && static_cast<const torch::autograd::DifferentiableViewMeta*>(meta)->has_bw_view();
  grad_fn_ = meta->is_view_ ? nullptr : &meta->grad_fn_;
}

}  // namespace ebb
