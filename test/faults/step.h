#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "offload/offloader.h"

namespace ebb::faults {

// A small training step whose every activation may move: a chain of operations that save what they get, what they give,
// or views of it, two backward passes over the retained graph, and an update of the weights. The same values at every
// call.
class Step {
 public:
  explicit Step(c10::Device device);

  // The gradients of both passes, and the weights after the update. `offloader`: null for plain autograd. `managed`:
  // the offloader manages the weights, and one of them at a time is on the device.
  [[nodiscard]] std::vector<at::Tensor> run(Offloader* offloader, bool managed);

  // Of the last run, which may have ended by an error: whether each weight has its values from before or after the
  // update. Lets go of the weights.
  [[nodiscard]] bool weights_are_whole();

 private:
  [[nodiscard]] std::vector<at::Tensor> make_weights() const;

  const at::Tensor input_;
  const at::Tensor weight_;
  std::vector<at::Tensor> weights_;  // of the run
  std::vector<at::Tensor> updated_;  // of the first run, which is plain
};

// Whether both hold the same bits.
[[nodiscard]] bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

// After a failed backward, autograd's queue of this thread still holds nodes that were ready to run. Runs them, by a
// graph that is older than they are.
void forget_failed_backward();

}  // namespace ebb::faults
