// The language model of examples/, trained for a few steps.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>

#include "examples/llama/llama.h"
#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

LlamaConfig tiny() {
  LlamaConfig config;
  config.vocab = 32;
  config.dim = 32;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn = 40;
  return config;
}

// Losses, weights and gradients of `steps` steps of gradient descent.
Program train_llama(int steps, bool backward_in_guard) {
  return [=](const Run& run) {
    Llama model(tiny(), /*max_seq=*/16, /*seed=*/3);
    if (run.offloader() != nullptr) {
      run.offloader()->exclude(model);
    }
    const at::Tensor tokens = (at::arange(2 * 17) * 7).remainder(32).view({2, 17});
    Tensors results;
    for (int step = 0; step < steps; ++step) {
      at::Tensor loss;
      auto guard = run.guard();
      {
        const at::Tensor hidden = model.forward_hidden(tokens.narrow(1, 0, 16));
        const auto head = run.no_op();
        const at::Tensor targets = tokens.narrow(1, 1, 16).reshape({-1});
        loss = at::cross_entropy_loss(model.head(hidden).view({-1, 32}).to(at::kFloat), targets);
      }
      if (!backward_in_guard) {
        guard.reset();
      }
      loss.backward();
      results.push_back(loss.detach());
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : model.parameters()) {
        results.push_back(parameter.grad().clone());
        parameter.sub_(parameter.grad(), 0.5);
        parameter.mutable_grad().reset();
        results.push_back(parameter.detach().clone());
      }
    }
    return results;
  };
}

TEST_CASE_METHOD(NoLeak, "the language model trains to the same losses, gradients and weights") {
  expect_parity(train_llama(2, true));
  expect_parity(train_llama(2, false));
}

TEST_CASE_METHOD(NoLeak, "the language model moves its activations and none of its weights and tables") {
  Rig rig(late_without_stash());
  REQUIRE(outcome(train_llama(1, false), Run(&rig.offloader())).error.empty());
  const Stats stats = rig.stats();
  CHECK(stats.offloaded.tensors > 20);
  CHECK(stats.fetched.tensors > 20);
  CHECK(stats.deduplicated.tensors > 0);
  CHECK(stats.kept_for(KeptReason::kParameter).tensors > 10);
  CHECK(stats.kept_for(KeptReason::kExcluded).tensors > 0);
  CHECK(stats.saved_on_device.peak_bytes < stats.offloaded.bytes / 2);
}

TEST_CASE_METHOD(NoLeak, "the language model is exact under every policy") {
  const std::vector<std::shared_ptr<Policy>> policies{
      minimum_size(4096),
      only_operations({"SiluBackward0", "MulBackward0"}),
      except_operations({"MulBackward0"}, minimum_size(2048)),
      callback(
          [](const Candidate& candidate) { return candidate.ordinal % 3 == 0 ? Decision::kKeep : Decision::kOffload; }),
  };
  for (const auto& policy : policies) {
    for (Setting setting : {late(), late_without_stash(), disk()}) {
      setting.options.policy = policy;
      expect_parity(train_llama(3, false), setting);
    }
  }
}

}  // namespace
}  // namespace ebb
