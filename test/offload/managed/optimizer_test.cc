// LibTorch's optimizers over managed parameters: gradients and states come and go, too.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/parameters.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using Tensors = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

constexpr std::int64_t kWidth = 32;
constexpr std::uint64_t kBytes = kWidth * kWidth * sizeof(float);
constexpr int kSteps = 20;
constexpr int kMicroBatches = 2;

Parameters within(std::uint64_t device_bytes) {
  Parameters how;
  how.device_bytes = device_bytes;
  how.minimum_bytes = 0;
  return how;
}

Tensors make_weights(at::ScalarType dtype) {
  at::manual_seed(1);
  Tensors weights;
  for (int i = 0; i < 5; ++i) {
    weights.push_back((at::randn({kWidth, kWidth}) * 0.2).to(dtype).requires_grad_());
  }
  weights.push_back(at::randn({kWidth}).to(dtype).requires_grad_());
  return weights;
}

// The first weight is used by the last layer, too.
at::Tensor loss_of(const Tensors& weights, const at::Tensor& input) {
  at::Tensor hidden = input;
  for (const at::Tensor& weight : weights) {
    hidden = weight.dim() == 1 ? hidden * weight : at::silu(at::matmul(hidden, weight.t()));
  }
  return at::matmul(hidden, weights.front()).to(at::kFloat).square().mean();
}

// Losses, then weights and gradients' norms: accumulated over micro-batches, clipped, with a learning rate that falls.
Tensors train(const Tensors& weights, const MakeOptimizer& make, Offloader* offloader) {
  const std::unique_ptr<torch::optim::Optimizer> optimizer = make(weights);
  torch::optim::StepLR schedule(*optimizer, /*step_size=*/5, /*gamma=*/0.5);
  Tensors seen;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      const at::Tensor input = at::arange(4 * kWidth, at::kFloat).view({4, kWidth}).sin() + 0.1 * (step + i);
      const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
      torch::autograd::backward({loss_of(weights, input.to(weights.front().scalar_type()))});
    }
    seen.push_back(at::scalar_tensor(torch::nn::utils::clip_grad_norm_(weights, 1.0), at::kDouble));
    if (step != 7) {  // a step that is skipped, as for an overflow
      optimizer->step();
    }
    optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
    schedule.step();
  }
  for (const at::Tensor& weight : weights) {
    seen.push_back(weight.detach().clone());
  }
  return seen;
}

void check_equal(const Tensors& expected, const Tensors& found) {
  REQUIRE(expected.size() == found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO(i);
    CHECK(at::equal(expected[i], found[i]));
  }
}

struct Named {
  std::string name;
  MakeOptimizer make;
};

std::vector<Named> optimizers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace): names of options, below
  return {
      {"AdamW",
       [](const Tensors& weights) { return std::make_unique<AdamW>(weights, AdamWOptions(1e-2).weight_decay(0.1)); }},
      {"AdamW with amsgrad",
       [](const Tensors& weights) { return std::make_unique<AdamW>(weights, AdamWOptions(1e-2).amsgrad(true)); }},
      {"Adam", [](const Tensors& weights) { return std::make_unique<Adam>(weights, AdamOptions(1e-2)); }},
      {"SGD with momentum",
       [](const Tensors& weights) { return std::make_unique<SGD>(weights, SGDOptions(1e-2).momentum(0.9)); }},
      {"RMSprop",
       [](const Tensors& weights) { return std::make_unique<RMSprop>(weights, RMSpropOptions(1e-3).momentum(0.5)); }},
  };
}

TEST_CASE("optimizers over managed parameters give the same bits", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  for (const Named& optimizer : optimizers()) {
    const Tensors expected = train(make_weights(dtype), optimizer.make, nullptr);
    for (const std::uint64_t bound : {std::uint64_t{0}, 5 * kBytes}) {
      for (const Setting& setting : some_settings()) {
        INFO(optimizer.name << ", " << setting.name << ", bound " << bound);
        Rig rig(setting);
        Tensors weights = make_weights(dtype);
        rig.offloader().manage(weights, within(bound));
        check_equal(expected, train(weights, optimizer.make, &rig.offloader()));
        weights.clear();
      }
    }
  }
}

TEST_CASE("gradients and states are at home between their uses", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(0));
    torch::optim::AdamW optimizer(weights, torch::optim::AdamWOptions(1e-2));
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    for (const at::Tensor& weight : weights) {
      CHECK(is_managed(weight.grad()));
      CHECK(weight.grad().storage().data() == nullptr);
    }
    optimizer.step();
    int states = 0;
    for (const auto& [key, state] : optimizer.state()) {
      const auto& adam = dynamic_cast<const torch::optim::AdamWParamState&>(*state);
      CHECK(is_managed(adam.exp_avg()));
      CHECK(is_managed(adam.exp_avg_sq()));
      states += adam.exp_avg().storage().data() == nullptr && adam.exp_avg_sq().storage().data() == nullptr ? 1 : 0;
    }
    CHECK(states >= 5);  // those of the last weight may not have left yet
  }
}

TEST_CASE("a gradient whose memory the program shares stays", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(0));
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    Tensors flat;
    for (const at::Tensor& weight : weights) {
      weight.mutable_grad() = at::ones_like(weight.detach().clone());
      flat.push_back(weight.grad().view({-1}));
    }
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    for (std::size_t i = 0; i < weights.size(); ++i) {
      CHECK_FALSE(is_managed(weights[i].grad()));
      CHECK(at::equal(flat[i], weights[i].grad().view({-1})));
    }
  }
}

TEST_CASE("gradients may be left alone", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    Parameters how = within(0);
    how.gradients = false;
    rig.offloader().manage(weights, how);
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    CHECK_FALSE(is_managed(weights[0].grad()));
  }
}

TEST_CASE("what is made like a parameter in a model is no state", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(0));
    CHECK_FALSE(is_managed(at::zeros_like(weights[0])));  // with gradients
    CHECK_FALSE(is_managed(at::zeros_like(weights[0].detach())));
  }
}

}  // namespace
}  // namespace ebb
