#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/offloader.h"

namespace ebb::faults {

// A small training step whose every activation may move: a chain of operations that save what they get, what they give,
// or views of it, and two backward passes over the retained graph. The same values at every call.
class Step {
 public:
  explicit Step(c10::Device device);

  // The gradients of both passes. null: plain autograd.
  [[nodiscard]] std::vector<at::Tensor> run(Offloader* offloader) const;

 private:
  const at::Tensor input_;
  const at::Tensor weight_;
};

// Whether both hold the same bits.
[[nodiscard]] bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

// After a failed backward, autograd's queue of this thread still holds nodes that were ready to run. Runs them, by a
// graph that is older than they are.
void forget_failed_backward();

}  // namespace ebb::faults
