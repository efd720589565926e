#pragma once

#include <cstdint>

#include <ATen/core/TensorBase.h>

#include "offload/base/libtorch.h"

namespace ebb {

// What autograd knows of a tensor, looked up once. at::Tensor's own questions (`is_leaf`, `is_view` and so on) are
// virtual calls, each of which looks up the same AutogradMeta, and a save asks most of them.
//
// Threads: as at::Tensor's questions. Must not outlive the tensor.
class AutogradInfo {
 public:
  explicit AutogradInfo(const at::TensorBase& tensor);

  [[nodiscard]] bool is_leaf() const { return is_leaf_; }
  [[nodiscard]] bool is_view() const { return is_view_; }  // for backward: a detached tensor is none
  [[nodiscard]] bool requires_grad() const { return requires_grad_; }
  [[nodiscard]] std::uint32_t output_nr() const { return output_nr_; }

  // The node that made the tensor; for a view that has been written to, the node of the write. Null for a leaf.
  [[nodiscard]] const NodePtr& grad_fn() const;

 private:
  const at::TensorBase& tensor_;
  const NodePtr* grad_fn_;  // null where the tensor has to be asked
  bool is_leaf_ = true;
  bool is_view_ = false;
  bool requires_grad_ = false;
  std::uint32_t output_nr_ = 0;
};

}  // namespace ebb
