#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/step_model.h"

namespace ebb {

class Offloader;

// One training step without its optimizer: forward, then the gradients of mean(logsumexp(float(output))) for all
// parameters. The head runs under a NoOpGuard.
class StepWorkload {
 public:
  StepWorkload(const StepShape& shape, at::ScalarType dtype, c10::Device device)
      : model_(make_step_model(shape, dtype, device)) {}

  // `offloader` null: autograd as it is. `after_forward`, if any, is called right after the head's linear.
  std::vector<at::Tensor> step(Offloader* offloader, const std::function<void()>& after_forward = {});

 private:
  const std::unique_ptr<StepModel> model_;
};

}  // namespace ebb
