#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ebb {

// Says that an optimizer of LibTorch's, or of the program's, steps on the calling thread while an object of this class
// lives:
//
//     const ebb::OptimizerStep makes_states(optimizer);
//     optimizer.step();
//
// What the thread then makes by zeros_like, ones_like or full_like of one of the optimizer's parameters, without
// gradients and outside of backward, is a state. If Offloader::manage has been given the parameter, the state is
// managed, too, as soon as it is made. Otherwise, and without such an object, it is the program's, and stays on the
// device; a process that never makes such an object gets a warning with the first. ebb's own optimizers need no such
// object.
//
// Threads: for the thread that made the object, which may end on another.
class [[nodiscard]] OptimizerStep {
 public:
  explicit OptimizerStep(const torch::optim::Optimizer& optimizer);
  explicit OptimizerStep(std::vector<at::Tensor> parameters);
  OptimizerStep(const OptimizerStep&) = delete;
  OptimizerStep& operator=(const OptimizerStep&) = delete;

  // Whether an optimizer of this parameter steps on the calling thread.
  [[nodiscard]] static bool steps(const at::Tensor& parameter);

  // Whether the process has ever made an object of this class.
  [[nodiscard]] static bool is_known();

 private:
  const std::shared_ptr<const std::vector<at::Tensor>> parameters_;
};

}  // namespace ebb
