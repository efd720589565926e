#include "bench/step/model.h"

#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "examples/llama/llama.h"

namespace ebb {
namespace {

constexpr std::uint64_t kWeightSeed = 1;
constexpr std::uint64_t kTokenSeed = 2;

class LlamaModel final : public StepModel {
 public:
  LlamaModel(const LlamaShape& shape, const at::TensorOptions& options)
      : model_(shape.model, shape.sequence, kWeightSeed, options) {
    const at::Generator generator = at::detail::createCPUGenerator(kTokenSeed);
    tokens_ =
        at::randint(0, shape.model.vocab, {shape.batch, shape.sequence}, generator, at::kLong).to(options.device());
  }

  at::Tensor body(const PartRunner& run) override { return model_.forward_hidden(tokens_, run); }
  at::Tensor head(const at::Tensor& hidden) override { return model_.head(hidden); }
  [[nodiscard]] std::vector<at::Tensor> parameters() const override { return model_.parameters(); }

 private:
  Llama model_;
  at::Tensor tokens_;  // int64 [batch, sequence]
};

// Draws weights and inputs on the model's own device.
class Source {
 public:
  explicit Source(const at::TensorOptions& options)
      : options_(options), generator_(at::globalContext().defaultGenerator(options.device()).clone()) {
    generator_.set_current_seed(kWeightSeed);
  }

  at::Tensor normal(at::IntArrayRef sizes, double deviation) {
    return at::empty(sizes, options_).normal_(0.0, deviation, generator_);
  }

  // Deviation as He et al. (2015) for `fan_in` inputs.
  at::Tensor weight(at::IntArrayRef sizes, std::int64_t fan_in) {
    return normal(sizes, std::sqrt(2.0 / static_cast<double>(fan_in))).requires_grad_();
  }

  at::Tensor filled(std::int64_t size, double value) { return at::full({size}, value, options_).requires_grad_(); }

 private:
  const at::TensorOptions options_;
  at::Generator generator_;
};

class Mlp final : public StepModel {
 public:
  Mlp(const MlpShape& shape, const at::TensorOptions& options) {
    Source source(options);
    input_ = source.normal({shape.rows, shape.width}, 1.0);
    for (std::int64_t i = 0; i <= shape.layers; ++i) {
      weights_.push_back(source.weight({shape.width, shape.width}, shape.width));
    }
  }

  at::Tensor body(const PartRunner& run) override {
    at::Tensor x = input_;
    for (std::size_t i = 0; i + 1 < weights_.size(); ++i) {
      x = run([weight = weights_[i]](const at::Tensor& in) { return in + at::gelu(at::linear(in, weight)); }, x);
    }
    return x;
  }

  at::Tensor head(const at::Tensor& hidden) override { return at::linear(hidden, weights_.back()); }
  [[nodiscard]] std::vector<at::Tensor> parameters() const override { return weights_; }

 private:
  at::Tensor input_;
  std::vector<at::Tensor> weights_;  // the head's last
};

class Stack final : public StepModel {
 public:
  Stack(const StackShape& shape, const at::TensorOptions& options) {
    Source source(options);
    input_ = source.normal({shape.rows, shape.width}, 1.0);
    for (std::int64_t i = 0; i < shape.layers; ++i) {
      parameters_.push_back(source.weight({shape.width, shape.width}, shape.width));
      parameters_.push_back(source.filled(shape.width, 0.0));
    }
  }

  at::Tensor body(const PartRunner& run) override {
    at::Tensor x = input_;
    for (std::size_t i = 0; i < parameters_.size(); i += 2) {
      x = run([weight = parameters_[i],
               bias = parameters_[i + 1]](const at::Tensor& in) { return at::relu(at::linear(in, weight, bias)); },
              x);
    }
    return x;
  }

  at::Tensor head(const at::Tensor& hidden) override { return hidden; }
  [[nodiscard]] std::vector<at::Tensor> parameters() const override { return parameters_; }

 private:
  at::Tensor input_;
  std::vector<at::Tensor> parameters_;  // each layer's weight and bias
};

class Convolutions final : public StepModel {
 public:
  Convolutions(const ConvolutionShape& shape, const at::TensorOptions& options) {
    constexpr std::int64_t kColors = 3;
    constexpr int kStages = 4;
    Source source(options);
    input_ = source.normal({shape.batch, kColors, shape.image, shape.image}, 1.0);
    stem_ = make_layer(source, kColors, shape.channels, 1);
    std::int64_t channels = shape.channels;
    for (int stage = 0; stage < kStages; ++stage) {
      for (std::int64_t block = 0; block < shape.layers; ++block) {
        const bool halves = stage > 0 && block == 0;
        const std::int64_t in = halves ? channels / 2 : channels;
        blocks_.push_back({make_layer(source, in, channels, halves ? 2 : 1), make_layer(source, channels, channels, 1),
                           halves ? parameter(source.weight({channels, in, 1, 1}, in)) : at::Tensor()});
      }
      channels *= 2;
    }
    head_ = parameter(source.weight({shape.classes, channels / 2}, channels / 2));
  }

  at::Tensor body(const PartRunner& run) override {
    at::Tensor x = at::relu(apply(stem_, input_));
    for (const Residual& residual : blocks_) {
      x = run([residual](const at::Tensor& in) { return apply(residual, in); }, x);
    }
    return x.mean({2, 3});
  }

  at::Tensor head(const at::Tensor& hidden) override { return at::linear(hidden, head_); }
  [[nodiscard]] std::vector<at::Tensor> parameters() const override { return parameters_; }

 private:
  struct Layer {
    at::Tensor weight;
    at::Tensor gain;
    at::Tensor bias;
    std::int64_t stride;
  };
  struct Residual {
    Layer first;
    Layer second;
    at::Tensor shortcut;  // undefined: the input itself
  };

  at::Tensor parameter(at::Tensor tensor) {
    parameters_.push_back(tensor);
    return tensor;
  }

  Layer make_layer(Source& source, std::int64_t in, std::int64_t out, std::int64_t stride) {
    constexpr std::int64_t kSide = 3;
    return {parameter(source.weight({out, in, kSide, kSide}, in * kSide * kSide)), parameter(source.filled(out, 1.0)),
            parameter(source.filled(out, 0.0)), stride};
  }

  static at::Tensor apply(const Layer& layer, const at::Tensor& x) {
    constexpr double kMomentum = 0.1;
    constexpr double kEpsilon = 1e-5;
    return at::batch_norm(at::conv2d(x, layer.weight, {}, layer.stride, /*padding=*/1), layer.gain, layer.bias,
                          /*running_mean=*/{}, /*running_var=*/{}, /*training=*/true, kMomentum, kEpsilon,
                          at::globalContext().userEnabledCuDNN());
  }

  static at::Tensor apply(const Residual& block, const at::Tensor& x) {
    const at::Tensor inside = apply(block.second, at::relu(apply(block.first, x)));
    const at::Tensor around = block.shortcut.defined() ? at::conv2d(x, block.shortcut, {}, block.first.stride) : x;
    return at::relu(inside + around);
  }

  at::Tensor input_;
  Layer stem_;
  std::vector<Residual> blocks_;
  at::Tensor head_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace

std::unique_ptr<StepModel> make_step_model(const StepShape& shape, at::ScalarType dtype, c10::Device device) {
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(dtype);
  if (const auto* const llama = std::get_if<LlamaShape>(&shape.sizes)) {
    return std::make_unique<LlamaModel>(*llama, options);
  }
  if (const auto* const mlp = std::get_if<MlpShape>(&shape.sizes)) {
    return std::make_unique<Mlp>(*mlp, options);
  }
  if (const auto* const stack = std::get_if<StackShape>(&shape.sizes)) {
    return std::make_unique<Stack>(*stack, options);
  }
  return std::make_unique<Convolutions>(std::get<ConvolutionShape>(shape.sizes), options);
}

}  // namespace ebb
