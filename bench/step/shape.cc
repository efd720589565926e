#include "bench/step/shape.h"

#include <stdexcept>
#include <utility>

namespace ebb {
namespace {

constexpr std::int64_t kMostLayers = 1 << 20;

LlamaConfig llama_3_8b(std::int64_t layers) {
  return {.vocab = 128256, .dim = 4096, .layers = layers, .heads = 32, .kv_heads = 8, .ffn = 14336, .rope_theta = 5e5};
}

std::int64_t& layers_of(LlamaShape& sizes) { return sizes.model.layers; }
std::int64_t& layers_of(MlpShape& sizes) { return sizes.layers; }
std::int64_t& layers_of(StackShape& sizes) { return sizes.layers; }
std::int64_t& layers_of(ConvolutionShape& sizes) { return sizes.layers; }

}  // namespace

const std::vector<StepShape>& step_shapes() {
  static const std::vector<StepShape> shapes{
      {"w1", LlamaShape{llama_3_8b(9), 8, 1024}},
      {"small",
       LlamaShape{
           {.vocab = 32000, .dim = 1024, .layers = 16, .heads = 16, .kv_heads = 8, .ffn = 3584, .rope_theta = 5e5},
           8,
           1024}},
      {"tiny",
       LlamaShape{
           {.vocab = 256, .dim = 256, .layers = 4, .heads = 8, .kv_heads = 4, .ffn = 704, .rope_theta = 1e4}, 4, 256}},
      {"long", LlamaShape{llama_3_8b(2), 1, 32768}},
      {"mlp", MlpShape{.layers = 96, .width = 1024, .rows = 16384}},
      {"tiny-mlp", MlpShape{.layers = 6, .width = 64, .rows = 8192}},
      {"stack", StackShape{.layers = 100, .width = 16, .rows = 128}},
      {"resnet", ConvolutionShape{.layers = 4, .channels = 64, .image = 112, .batch = 128, .classes = 1000}},
      {"tiny-resnet", ConvolutionShape{.layers = 1, .channels = 16, .image = 64, .batch = 16, .classes = 10}},
  };
  return shapes;
}

StepShape step_shape(const std::string& name) {
  std::string names;
  for (const StepShape& shape : step_shapes()) {
    if (shape.name == name) {
      return shape;
    }
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  throw std::invalid_argument("unknown shape \"" + name + "\": there are " + names);
}

std::int64_t layers(const StepShape& shape) {
  StepShape copy = shape;
  return std::visit([](auto& sizes) { return layers_of(sizes); }, copy.sizes);
}

StepShape with_layers(StepShape shape, std::int64_t layers) {
  if (layers < 1 || layers > kMostLayers) {
    throw std::invalid_argument("layers must be from 1 to " + std::to_string(kMostLayers) + ", got " +
                                std::to_string(layers));
  }
  std::visit([layers](auto& sizes) { layers_of(sizes) = layers; }, shape.sizes);
  return shape;
}

}  // namespace ebb
