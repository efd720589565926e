#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/autograd/function.h>

#include "offload/base/autograd_info.h"
#include "offload/base/libtorch.h"

namespace ebb {

// Checks whether a saved tensor has been written to since it was saved.
//
// Note [Versions are ours to check]
// SavedVariable::unpack compares versions only for saves without hooks. Once a hook is installed, nobody else would
// notice an in-place write to a saved tensor, offloaded or not, and the gradient would be wrong in silence.
class VersionCheck {
 public:
  // Takes the version of `saved` as the one to expect. `info`: of `saved`.
  VersionCheck(const at::Tensor& saved, const AutogradInfo& info)
      : counter_(saved.unsafeGetTensorImpl()->version_counter()),
        saved_version_(counter_.current_version()),
        saved_(saved.getIntrusivePtr()),
        grad_fn_(info.grad_fn()),
        output_nr_(info.output_nr()) {}

  // Lets go of the weak reference to the tensor: a tensor that a save refers to is not handed out as nobody's (Note
  // [Lent tensors] in lent_tensor.h).
  void forget_tensor() { saved_.reset(); }

  // Throws c10::Error in LibTorch's own words if the version has moved on. `like` has the type and sizes to name.
  void check(const at::Tensor& like) const;

  // Whether the version has not moved on.
  [[nodiscard]] bool holds() const { return counter_.current_version() == saved_version_; }

  // The tensor that was saved, if the program still has it; else undefined.
  [[nodiscard]] at::Tensor saved() const { return at::Tensor(saved_.lock()); }
  [[nodiscard]] const auto& weak() const { return saved_; }

 private:
  [[nodiscard]] NodePtr producer() const;

  // Not const: a move of const members would be three copies, each of which writes to a count that threads share.
  c10::VariableVersion counter_;  // shared with the tensor and all its views
  std::uint32_t saved_version_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> saved_;  // weak, as is the next:
  WeakNodePtr grad_fn_;                                                       // the node may own this save
  std::uint32_t output_nr_;
};

}  // namespace ebb
