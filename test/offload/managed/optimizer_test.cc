// LibTorch's optimizers over managed parameters: gradients and states come and go, too.

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
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
#include <torch/serialize/archive.h>

#include "offload/adamw.h"
#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/parameters.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using test::check_equal;
using test::is_away;
using test::within;

using Tensors = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

constexpr std::int64_t kWidth = 32;
constexpr std::uint64_t kBytes = kWidth * kWidth * sizeof(float);
constexpr int kSteps = 20;
constexpr int kMicroBatches = 2;

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

// AdamW of parameters in bfloat16 as a program would write it, with masters of its own and LibTorch's AdamW.
class ByHand final : public torch::optim::Optimizer {
 public:
  ByHand(const Tensors& weights, const torch::optim::AdamWOptions& options)
      : Optimizer(weights, std::make_unique<torch::optim::AdamWOptions>(options)),
        inner_(masters_of(weights), options) {}

  at::Tensor step(LossClosure /*closure*/) override {
    const at::NoGradGuard no_grad;
    dynamic_cast<torch::optim::AdamWOptions&>(inner_.param_groups().front().options())
        .lr(param_groups_.front().options().get_lr());
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      inner_.parameters()[i].mutable_grad() = parameters()[i].grad().to(at::kFloat);
    }
    inner_.step();
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      parameters()[i].copy_(inner_.parameters()[i]);
    }
    return {};
  }

 private:
  static Tensors masters_of(const Tensors& weights) {
    Tensors masters;
    for (const at::Tensor& weight : weights) {
      masters.push_back(weight.detach().to(at::kFloat));
    }
    return masters;
  }

  torch::optim::AdamW inner_;
};

TEST_CASE("ebb's AdamW has the bits of LibTorch's, and of float32 masters", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(GENERATE(false, true));
  const MakeOptimizer plain = [&](const Tensors& weights) -> std::unique_ptr<torch::optim::Optimizer> {
    if (dtype == at::kBFloat16) {
      return std::make_unique<ByHand>(weights, options);
    }
    return std::make_unique<torch::optim::AdamW>(weights, options);
  };
  const MakeOptimizer ours = [&](const Tensors& weights) { return std::make_unique<AdamW>(weights, options); };
  const Tensors expected = train(make_weights(dtype), plain, nullptr);
  check_equal(expected, train(make_weights(dtype), ours, nullptr));  // nothing is managed
  for (const std::uint64_t bound : {std::uint64_t{0}, 5 * kBytes}) {
    for (const Setting& setting : some_settings()) {
      INFO(setting.name << ", bound " << bound);
      Rig rig(setting);
      Tensors weights = make_weights(dtype);
      rig.offloader().manage(weights, within(bound));
      check_equal(expected, train(weights, ours, &rig.offloader()));
      weights.clear();
    }
  }
}

// Weights after some steps, each of one backward pass.
Tensors train_without_accumulation(const Tensors& weights, torch::optim::Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    const at::Tensor input = at::arange(4 * kWidth, at::kFloat).view({4, kWidth}).sin() + 0.1 * step;
    torch::autograd::backward({loss_of(weights, input.to(weights.front().scalar_type()))});
    optimizer.step();
    optimizer.zero_grad();
  }
  Tensors seen;
  for (const at::Tensor& weight : weights) {
    seen.push_back(weight.detach().clone());
  }
  return seen;
}

TEST_CASE("updates in backward have the bits of updates in step", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const bool managed_first = GENERATE(true, false);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const Tensors plain = make_weights(dtype);
  AdamW in_step(plain, options);
  const Tensors expected = train_without_accumulation(plain, in_step, 0, kSteps);
  Rig rig(late_without_stash());
  {
    const Tensors weights = make_weights(dtype);
    if (managed_first) {
      rig.offloader().manage(weights, within(kBytes));
    }
    AdamW in_backward(weights, options, UpdateIn::kBackward);
    if (!managed_first) {
      rig.offloader().manage(weights, within(kBytes));
    }
    torch::optim::SGD nothing(weights, torch::optim::SGDOptions(1));  // finds no gradient
    check_equal(expected, train_without_accumulation(weights, nothing, 0, kSteps));
  }
}

TEST_CASE("training goes on from a saved AdamW with the same bits", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(GENERATE(false, true));
  const Tensors plain = make_weights(dtype);
  AdamW resident(plain, options);
  const Tensors expected = train_without_accumulation(plain, resident, 0, kSteps);

  Rig rig(disk());
  {
    std::ostringstream saved;
    Tensors halfway;
    {
      const Tensors weights = make_weights(dtype);
      rig.offloader().manage(weights, within(0));
      AdamW optimizer(weights, options);
      halfway = train_without_accumulation(weights, optimizer, 0, kSteps / 2);
      torch::serialize::OutputArchive archive;
      optimizer.save(archive);
      archive.save_to(saved);
    }
    Tensors weights;
    for (const at::Tensor& each : halfway) {
      weights.push_back(each.clone().requires_grad_());
    }
    rig.offloader().manage(weights, within(0));
    AdamW optimizer(weights, torch::optim::AdamWOptions(7));  // what is loaded says how
    std::istringstream stream(saved.str());
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    optimizer.load(archive);
    for (const auto& [key, state] : optimizer.state()) {
      CHECK(is_managed(dynamic_cast<const AdamWState&>(*state).exp_avg));
    }
    check_equal(expected, train_without_accumulation(weights, optimizer, kSteps / 2, kSteps));
  }
}

TEST_CASE("a frozen parameter is left alone by updates in backward") {
  Tensors weights = make_weights(at::kFloat);
  weights.push_back(at::ones({kWidth}));  // knows nothing of autograd
  AdamW optimizer(weights, {}, UpdateIn::kBackward);
  torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
  CHECK(at::equal(weights.back(), at::ones({kWidth})));
  CHECK_FALSE(weights.front().grad().defined());
}

TEST_CASE("AdamW refuses what it cannot do") {
  const Tensors weights = make_weights(at::kFloat);
  CHECK_THROWS_AS(AdamW(weights, torch::optim::AdamWOptions(-1)), std::invalid_argument);
  CHECK_THROWS_AS(AdamW(weights, torch::optim::AdamWOptions(1).betas({0.9, 1})), std::invalid_argument);
  AdamW optimizer(weights);
  weights[0].mutable_grad() = at::ones({kWidth, kWidth}).to_sparse();
  CHECK_THROWS_WITH(optimizer.step(), Catch::Contains("sparse"));
}

TEST_CASE("an update in parts has the bits of an update at once") {
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true);
  const auto update = [&]<typename Optimizer>(std::type_identity<Optimizer> /*type*/) {
    at::manual_seed(1);
    const at::Tensor weight = at::randn({4, (1 << 22) + 5}).requires_grad_();  // parts of three rows and of one
    Optimizer optimizer({weight}, options);
    for (int step = 0; step < 2; ++step) {
      weight.mutable_grad() = weight.detach().sin();
      optimizer.step();
    }
    return weight.detach();
  };
  CHECK(at::equal(update(std::type_identity<AdamW>()), update(std::type_identity<torch::optim::AdamW>())));
}

TEST_CASE("so many bytes of parameters and states as are asked for stay on the device", "[managed]") {
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const MakeOptimizer ours = [&](const Tensors& weights) { return std::make_unique<AdamW>(weights, options); };
  const Tensors expected = train(make_weights(at::kFloat), ours, nullptr);
  constexpr std::uint64_t kVector = kWidth * sizeof(float);
  constexpr std::uint64_t kAll = 5 * kBytes + kVector;
  // All weights and two states of a matrix, or two weights alone.
  const std::uint64_t resident = GENERATE(kAll + 2 * kBytes + 8, 2 * kBytes);
  const bool all_stay = resident > kAll;
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Tensors weights = make_weights(at::kFloat);
    Parameters how = within(0);
    how.resident_bytes = resident;
    rig.offloader().manage(weights, how);
    CHECK(rig.offloader().stats().managed_resident.now_bytes == (all_stay ? kAll : 2 * kBytes));
    CHECK_FALSE(is_away(weights[0]));
    CHECK(weights[0].const_data_ptr() != nullptr);  // no pointer would outlive this memory
    CHECK(is_away(weights[4]) != all_stay);
    check_equal(expected, train(weights, ours, &rig.offloader()));
    CHECK(rig.offloader().stats().managed_resident.peak_bytes == (all_stay ? kAll + 2 * kBytes : 2 * kBytes));
    CHECK(rig.offloader().stats().managed_resident.capacity_bytes == resident);
    weights.clear();
  }
}

TEST_CASE("the room of resident storages that have ended is given to those that follow", "[managed]") {
  Rig rig(some_settings().front());
  Parameters how = within(0);
  how.resident_bytes = 2 * kBytes;
  for (int i = 0; i < 3; ++i) {
    const Tensors weights{at::ones({kWidth, kWidth}), at::ones({kWidth, kWidth})};
    rig.offloader().manage(weights, how);
    CHECK_FALSE(is_away(weights[0]));
    CHECK_FALSE(is_away(weights[1]));
    CHECK(rig.offloader().stats().managed_resident.now_bytes == 2 * kBytes);
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
      CHECK(is_away(weight.grad()));
    }
    optimizer.step();
    int states = 0;
    for (const auto& [key, state] : optimizer.state()) {
      const auto& adam = dynamic_cast<const torch::optim::AdamWParamState&>(*state);
      CHECK(is_managed(adam.exp_avg()));
      CHECK(is_managed(adam.exp_avg_sq()));
      states += is_away(adam.exp_avg()) && is_away(adam.exp_avg_sq()) ? 1 : 0;
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
    const at::NoGradGuard no_grad;
    CHECK_FALSE(is_managed(at::zeros_like(weights[0].detach())));
    CHECK_FALSE(is_managed(at::empty_like(weights[0])));
    CHECK(is_managed(at::zeros_like(weights[0])));
  }
}

}  // namespace
}  // namespace ebb
