#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/step/model.h"

namespace ebb {

class Offloader;

// How a step keeps what autograd saves.
struct StepMethod {
  StepMethod(Offloader* offloader, bool checkpoints = false)  // NOLINT(google-explicit-constructor)
      : offloader(offloader), checkpoints(checkpoints) {}

  Offloader* offloader;  // null: autograd as it is
  bool checkpoints;      // every block
};

// One training step without its optimizer: forward, then the gradients of mean(logsumexp(float(output))) for all
// parameters. The head runs under a NoOpGuard.
class StepWorkload {
 public:
  StepWorkload(const StepShape& shape, at::ScalarType dtype, c10::Device device)
      : model_(make_step_model(shape, dtype, device)) {}

  // Functions that are called on the way; empty for none.
  struct Calls {
    std::function<void()> after_head = {};  // right after the head's linear
    std::function<void()> before_backward = {};
  };

  std::vector<at::Tensor> step(StepMethod method, const Calls& calls);
  std::vector<at::Tensor> step(StepMethod method) { return step(method, {}); }

 private:
  const std::unique_ptr<StepModel> model_;
};

}  // namespace ebb
