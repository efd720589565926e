// What is dropped and computed again on a GPU, where attention and norms have nodes of their own.

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"

namespace ebb {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

struct Operation {
  std::string name;
  std::string node;  // that it must make, or the test shows nothing of it
  std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
};

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::TensorOptions().device(kGpu).dtype(dtype)).requires_grad_();
}

// The result is saved by what follows, dropped, and computed again, in each of several steps but the first. The
// gradient of what it is multiplied by shows its bits, and needs no backward of the operation, which may not agree with
// itself.
void check(const Operation& operation, const std::vector<at::Tensor>& leaves) {
  at::Tensor factor;
  const auto loss = [&] {
    std::vector<at::Tensor> activations;
    for (const at::Tensor& each : leaves) {
      activations.push_back(each * 0.5);
    }
    const at::Tensor result = operation.run(activations);
    CHECK(result.grad_fn()->name() == operation.node);
    if (!factor.defined()) {
      factor = at::ones_like(result, result.options().requires_grad(false)).requires_grad_();
    }
    return (result * factor).sum();
  };
  const auto step = [&](Offloader* offloader) {
    std::optional<OffloadGuard> guard;
    if (offloader != nullptr) {
      guard.emplace(*offloader);
    }
    const at::Tensor made = loss();  // and with it the factor
    return torch::autograd::grad({made}, {factor}).front();
  };
  const at::Tensor expected = step(nullptr);
  Options options;
  options.device = kGpu;
  options.policy = recompute(Recompute::kComputeBound);
  Offloader offloader(options);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    CHECK(step(&offloader).equal(expected));
    CHECK(offloader.stats().recomputed.tensors == i - 1);  // the first step proves
  }
}

}  // namespace

TEST_CASE("a norm is recomputed to the bit on a GPU", "[gpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  const std::int64_t width = GENERATE(1024, 1023);  // the second one is not vectorised
  const bool weighted = GENERATE(true, false);
  CAPTURE(dtype, width, weighted);
  std::vector<at::Tensor> leaves{leaf({2, 17, width}, dtype)};
  if (weighted) {
    leaves.push_back(leaf({width}, dtype));
  }
  check({"rms_norm", "FusedRmsNormBackward0",
         [&](const std::vector<at::Tensor>& in) {
           const auto weight = weighted ? std::optional(in[1]) : std::nullopt;
           return at::rms_norm(in[0], {width}, weight, 1e-5);
         }},
        leaves);
}

TEST_CASE("each kind of attention is recomputed to the bit on a GPU", "[gpu]") {
  struct Kind {
    std::string node;
    std::function<void(at::Context&, bool)> use;
    at::ScalarType dtype;
  };
  const auto kind = GENERATE(
      Kind{"ScaledDotProductFlashAttentionBackward0", [](auto& c, bool on) { c.setSDPUseFlash(on); }, at::kBFloat16},
      Kind{"ScaledDotProductEfficientAttentionBackward0", [](auto& c, bool on) { c.setSDPUseMemEfficient(on); },
           at::kFloat},
      Kind{"ScaledDotProductCudnnAttentionBackward0", [](auto& c, bool on) { c.setSDPUseCuDNN(on); }, at::kBFloat16});
  CAPTURE(kind.node);
  at::Context& settings = at::globalContext();
  const bool before[] = {settings.userEnabledFlashSDP(), settings.userEnabledMemEfficientSDP(),
                         settings.userEnabledCuDNNSDP()};
  const bool deterministic = settings.deterministicAlgorithms();
  settings.setDeterministicAlgorithms(false, /*warn_only=*/false);  // or cuDNN's is not used
  settings.setSDPUseFlash(false);
  settings.setSDPUseMemEfficient(false);
  settings.setSDPUseCuDNN(false);
  kind.use(settings, true);
  const std::vector<at::Tensor> leaves{leaf({2, 4, 128, 64}, kind.dtype), leaf({2, 4, 128, 64}, kind.dtype),
                                       leaf({2, 4, 128, 64}, kind.dtype)};
  check({kind.node, kind.node,
         [](const std::vector<at::Tensor>& in) {
           return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0, /*is_causal=*/true);
         }},
        leaves);
  settings.setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
  settings.setSDPUseFlash(before[0]);
  settings.setSDPUseMemEfficient(before[1]);
  settings.setSDPUseCuDNN(before[2]);
}

}  // namespace ebb
