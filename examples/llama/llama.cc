#include "examples/llama/llama.h"

#include <string>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>

#include "examples/llama/block.h"

namespace ebb {
namespace {

constexpr double kNormEpsilon = 1e-5;
constexpr double kInitDeviation = 0.02;

// The angles of each position [max_seq, head_dim], the same for both halves of a head.
at::Tensor rope_angles(std::int64_t max_seq, std::int64_t head_dim, double theta) {
  const auto exponent = at::arange(0, head_dim, 2, at::kFloat) / static_cast<double>(head_dim);
  const auto frequency = at::pow(at::Scalar(theta), exponent).reciprocal();
  const auto half = at::outer(at::arange(max_seq, at::kFloat), frequency);
  return at::cat({half, half}, -1);
}

// Gives parameters their values on the model's own device: drawing billions of values on the CPU would take minutes.
class Initializer {
 public:
  Initializer(std::uint64_t seed, const at::Device& device)
      : generator_(at::globalContext().defaultGenerator(device).clone()) {
    generator_.set_current_seed(seed);
  }

  void fill(const at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    if (parameter.dim() == 1) {
      parameter.fill_(1.0);  // a norm's gain
    } else {
      parameter.normal_(0.0, kInitDeviation, generator_);
    }
  }

 private:
  at::Generator generator_;
};

}  // namespace

Llama::Llama(const LlamaConfig& config, std::int64_t max_seq, std::uint64_t seed, const at::TensorOptions& options,
             const std::function<void(const at::Tensor& parameter)>& made)
    : config_(config) {
  validate(config);
  Initializer initializer(seed, options.device());
  const auto finish = [&](const at::Tensor& parameter) {
    initializer.fill(parameter);
    if (made) {
      made(parameter);
    }
  };
  const auto own = [&](const char* name, at::IntArrayRef sizes) {
    at::Tensor& parameter = register_parameter(name, at::empty(sizes, options));
    finish(parameter);
    return parameter;
  };
  embedding_ = own("embedding", {config.vocab, config.dim});
  norm_ = own("norm", {config.dim});
  head_ = own("head", {config.vocab, config.dim});
  for (std::int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(register_module("block" + std::to_string(i), std::make_shared<LlamaBlock>(config, options)));
    for (const at::Tensor& parameter : blocks_.back()->parameters()) {
      finish(parameter);
    }
  }
  const auto angles = rope_angles(max_seq, config.dim / config.heads, config.rope_theta);
  cos_ = register_buffer("cos", angles.cos().to(options));
  sin_ = register_buffer("sin", angles.sin().to(options));
}

at::Tensor Llama::forward_hidden(const at::Tensor& tokens, const PartRunner& run) {
  const std::int64_t seq = tokens.size(1);
  TORCH_CHECK(seq <= max_seq(), "a sequence of ", seq, " tokens is over the model's longest of ", max_seq());
  const auto cos = cos_.narrow(0, 0, seq).unsqueeze(1);
  const auto sin = sin_.narrow(0, 0, seq).unsqueeze(1);
  auto x = at::embedding(embedding_, tokens);
  for (const auto& block : blocks_) {
    x = run([block, cos, sin](const at::Tensor& input) { return block->forward(input, cos, sin); }, x);
  }
  return at::rms_norm(x, norm_.sizes(), norm_, kNormEpsilon);
}

at::Tensor Llama::head(const at::Tensor& hidden) { return at::linear(hidden, head_); }

}  // namespace ebb
