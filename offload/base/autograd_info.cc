#include "offload/base/autograd_info.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace ebb {
namespace {

const NodePtr kNone;

}  // namespace

AutogradInfo::AutogradInfo(const at::TensorBase& tensor) : tensor_(tensor), grad_fn_(&kNone) {
  const auto* const meta = static_cast<torch::autograd::AutogradMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
  if (meta == nullptr) {
    return;
  }
  // As in LibTorch, a leaf is told by the field: grad_fn() would look for the node of a write to a view.
  is_leaf_ = meta->grad_fn_ == nullptr;
  requires_grad_ = meta->requires_grad();  // a view's: also of its base
  output_nr_ = meta->output_nr_;
  is_view_ = meta->is_view_ && static_cast<const torch::autograd::DifferentiableViewMeta*>(meta)->has_bw_view();
  grad_fn_ = meta->is_view_ ? nullptr : &meta->grad_fn_;
}

const NodePtr& AutogradInfo::grad_fn() const { return grad_fn_ != nullptr ? *grad_fn_ : tensor_.grad_fn(); }

}  // namespace ebb
