#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/step/shape.h"
#include "examples/llama/model_part.h"

namespace ebb {

// A model of the step benchmark with its input, in two parts, so that the second can run under a NoOpGuard.
class StepModel {
 public:
  virtual ~StepModel() = default;
  [[nodiscard]] virtual at::Tensor body(const PartRunner& run) = 0;
  [[nodiscard]] virtual at::Tensor head(const at::Tensor& hidden) = 0;
  [[nodiscard]] virtual std::vector<at::Tensor> parameters() const = 0;
};

// Inputs and weights come from fixed seeds.
[[nodiscard]] std::unique_ptr<StepModel> make_step_model(const StepShape& shape, at::ScalarType dtype,
                                                         c10::Device device);

}  // namespace ebb
