#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/step_shape.h"

namespace ebb {

class Llama;
class Offloader;

// One training step without its optimizer: forward, then the gradients of mean(logsumexp(float(logits))) for all
// parameters. The head runs under a NoOpGuard. Inputs and weights come from fixed seeds.
class StepWorkload {
 public:
  StepWorkload(const StepShape& shape, at::ScalarType dtype, c10::Device device);
  ~StepWorkload();

  // `offloader` null: autograd as it is. `after_forward`, if any, is called right after the head's linear.
  std::vector<at::Tensor> step(Offloader* offloader, const std::function<void()>& after_forward = {});

  [[nodiscard]] const Llama& model() const { return *model_; }

 private:
  std::shared_ptr<Llama> model_;
  at::Tensor tokens_;  // int64 [batch, sequence]
};

}  // namespace ebb
