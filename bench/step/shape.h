#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "examples/llama/config.h"

namespace ebb {

// examples/llama/llama.h.
struct LlamaShape {
  LlamaConfig model;
  std::int64_t batch = 0;
  std::int64_t sequence = 0;
};

// Residual layers x + gelu(linear(x)) over [rows, width], then a linear head of `width` outputs.
struct MlpShape {
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t rows = 0;
};

// relu(linear(x)) with a bias over [rows, width], and no head. With 100 layers, width 16 and 128 rows, the small model
// of Lightning thunder's CPU-offloading tutorial.
struct StackShape {
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t rows = 0;
};

// In the manner of ResNet: a stem, four stages of residual blocks (convolution, batch norm, relu, twice), each stage
// with twice the channels and half the image of the one before, the mean over the image, and a linear head.
struct ConvolutionShape {
  std::int64_t layers = 0;    // blocks a stage
  std::int64_t channels = 0;  // of the first stage
  std::int64_t image = 0;     // pixels a side; a multiple of 8
  std::int64_t batch = 0;
  std::int64_t classes = 0;
};

// A workload of the step benchmark: a model, and what a step feeds it.
struct StepShape {
  std::string name;
  std::variant<LlamaShape, MlpShape, StackShape, ConvolutionShape> sizes;
};

// "w1": Llama-3-8B with 9 layers, batch 8, sequence 1024. "small": a quarter of its width. "tiny": for a CPU. "long":
// two layers of it over one sequence of 32,768. "mlp": deep and narrow. "stack": deep and tiny. "resnet": convolutions.
// "tiny-mlp" and "tiny-resnet": for a CPU.
const std::vector<StepShape>& step_shapes();

// Throws std::invalid_argument that names the shapes there are.
StepShape step_shape(const std::string& name);

[[nodiscard]] std::int64_t layers(const StepShape& shape);

// Throws std::invalid_argument for a number that the model cannot have.
[[nodiscard]] StepShape with_layers(StepShape shape, std::int64_t layers);

}  // namespace ebb
