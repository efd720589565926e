#pragma once

#include <cstdint>

#include <ATen/core/TensorBase.h>

#include "offload/base/libtorch.h"

namespace ebb {

// Whether the node is that of a torch::autograd::Function, or of a Function of Python's.
[[nodiscard]] bool is_custom(const torch::autograd::Node& node);

// What autograd knows of a tensor, looked up once. at::Tensor's own accessors (`is_leaf`, `is_view` and so on) are
// virtual calls, each of which looks up the same AutogradMeta, and a save needs most of them. All but grad_fn are as of
// the construction.
//
// Threads: as at::Tensor's accessors. An AutogradInfo must not outlive its tensor.
class AutogradInfo {
 public:
  explicit AutogradInfo(const at::TensorBase& tensor);
  explicit AutogradInfo(at::TensorBase&& tensor) = delete;

  [[nodiscard]] bool is_leaf() const { return is_leaf_; }
  [[nodiscard]] bool is_view() const { return is_view_; }  // a differentiable view; a detached tensor is not
  [[nodiscard]] bool requires_grad() const { return requires_grad_; }
  [[nodiscard]] std::uint32_t output_nr() const { return output_nr_; }

  // The node that made the tensor; for a view that has been written to, the node of the write. Null for a leaf.
  [[nodiscard]] const NodePtr& grad_fn() const { return grad_fn_ != nullptr ? *grad_fn_ : tensor_.grad_fn(); }

 private:
  const at::TensorBase& tensor_;
  const NodePtr* grad_fn_;  // null where the tensor has to be asked
  bool is_leaf_ = true;
  bool is_view_ = false;
  bool requires_grad_ = false;
  std::uint32_t output_nr_ = 0;
};

}  // namespace ebb
