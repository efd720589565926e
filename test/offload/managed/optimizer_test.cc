// LibTorch's optimizers over managed parameters: gradients and states come and go, too.

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/managed/manage.h"
#include "offload/managed/postpone.h"
#include "offload/optimizer.h"
#include "offload/optimizer_step.h"
#include "offload/parameters.h"
#include "test/checked/fault_plan.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using test::archive_of;
using test::check_equal;
using test::is_away;
using test::load_archive;
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
      const OptimizerStep makes_states(*optimizer);
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
  namespace optim = torch::optim;
  return {
      {"AdamW",
       [](const Tensors& weights) {
         return std::make_unique<optim::AdamW>(weights, optim::AdamWOptions(1e-2).weight_decay(0.1));
       }},
      {"AdamW with amsgrad",
       [](const Tensors& weights) {
         return std::make_unique<optim::AdamW>(weights, optim::AdamWOptions(1e-2).amsgrad(true));
       }},
      {"Adam", [](const Tensors& weights) { return std::make_unique<optim::Adam>(weights, optim::AdamOptions(1e-2)); }},
      {"SGD with momentum",
       [](const Tensors& weights) {
         return std::make_unique<optim::SGD>(weights, optim::SGDOptions(1e-2).momentum(0.9));
       }},
      {"RMSprop",
       [](const Tensors& weights) {
         return std::make_unique<optim::RMSprop>(weights, optim::RMSpropOptions(1e-3).momentum(0.5));
       }},
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

// An optimizer of parameters in bfloat16 as a program would write it, with masters of its own and LibTorch's optimizer.
template <typename LibTorchs, typename Options>
class ByHand final : public torch::optim::Optimizer {
 public:
  ByHand(const Tensors& weights, const Options& options)
      : torch::optim::Optimizer(weights, std::make_unique<Options>(options)), inner_(masters_of(weights), options) {}

  at::Tensor step(LossClosure /*closure*/) override {
    const at::NoGradGuard no_grad;
    inner_.param_groups().front().options().set_lr(param_groups_.front().options().get_lr());
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

  LibTorchs inner_;
};

// One of ours, and LibTorch's.
struct Both {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&, UpdateIn, UpdateOn)> make;
  MakeOptimizer libtorchs;

  [[nodiscard]] auto ours(const Tensors& weights, UpdateIn update_in) const {
    return make(weights, update_in, UpdateOn::kDevice);
  }
};

template <typename LibTorchs, typename Options>
Both both(std::string name, const Options& options) {
  return {std::move(name),
          [options](const Tensors& weights, UpdateIn update_in, UpdateOn update_on) {
            return std::make_unique<OptimizerWith<Options>>(weights, options, update_in, update_on);
          },
          [options](const Tensors& weights) -> std::unique_ptr<torch::optim::Optimizer> {
            if (weights.front().scalar_type() == at::kBFloat16) {
              return std::make_unique<ByHand<LibTorchs, Options>>(weights, options);
            }
            return std::make_unique<LibTorchs>(weights, options);
          }};
}

std::vector<Both> ours_and_libtorchs() {
  namespace optim = torch::optim;
  return {both<optim::AdamW>("AdamW", optim::AdamWOptions(1e-2).weight_decay(0.1)),
          both<optim::AdamW>("AdamW with amsgrad", optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true)),
          both<optim::Adam>("Adam", optim::AdamOptions(1e-2)),
          both<optim::Adam>("Adam with amsgrad", optim::AdamOptions(1e-2).weight_decay(0.1).amsgrad(true)),
          both<optim::SGD>("SGD", optim::SGDOptions(1e-2).weight_decay(0.1)),
          both<optim::SGD>("SGD with momentum", optim::SGDOptions(1e-2).momentum(0.9).dampening(0.1).weight_decay(0.1)),
          both<optim::SGD>("SGD with nesterov", optim::SGDOptions(1e-2).momentum(0.9).nesterov(true))};
}

TEST_CASE("ebb's optimizers have the bits of LibTorch's, and of float32 masters", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  for (const Both& optimizer : ours_and_libtorchs()) {
    const Tensors expected = train(make_weights(dtype), optimizer.libtorchs, nullptr);
    for (const UpdateIn update : {UpdateIn::kStep, UpdateIn::kNextUse}) {
      const MakeOptimizer ours = [&](const Tensors& weights) { return optimizer.ours(weights, update); };
      check_equal(expected, train(make_weights(dtype), ours, nullptr));  // nothing is managed
      for (const std::uint64_t bound : {std::uint64_t{0}, 5 * kBytes}) {
        for (const Setting& setting : some_settings()) {
          INFO(optimizer.name << ", " << setting.name << ", bound " << bound);
          Rig rig(setting);
          Tensors weights = make_weights(dtype);
          rig.offloader().manage(weights, within(bound));
          check_equal(expected, train(weights, ours, &rig.offloader()));
          weights.clear();
        }
      }
    }
  }
}

// A weight after three updates with the same gradient. `writes`: the program sets the first row to zero before the
// last.
at::Tensor weight_after_three(bool writes, bool is_managed, UpdateIn update_in, UpdateOn update_on) {
  Rig rig(late_without_stash());
  at::Tensor weight = at::linspace(1, 2, kWidth * kWidth).view({kWidth, kWidth}).to(at::kBFloat16).requires_grad_();
  if (is_managed) {
    rig.offloader().manage({weight}, within(0));
  }
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.001), update_in, update_on);
  for (int step = 0; step < 3; ++step) {
    if (writes && step == 2) {
      const at::NoGradGuard no_grad;
      weight.narrow(0, 0, 1).zero_();
    }
    torch::autograd::backward({(weight * 0.5).sum()});
    optimizer.step();
    optimizer.zero_grad();
  }
  return weight.detach().clone();
}

TEST_CASE("a bfloat16 weight that the program writes counts, and the master keeps what was not written", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse, UpdateIn::kBackward);
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  const bool is_managed = GENERATE(false, true);
  const at::Tensor left_alone = weight_after_three(false, is_managed, update_in, update_on);
  const at::Tensor written = weight_after_three(true, is_managed, update_in, update_on);
  CHECK(written.narrow(0, 1, kWidth - 1).equal(left_alone.narrow(0, 1, kWidth - 1)));
  CHECK(written.narrow(0, 0, 1).abs().max().item<float>() < 0.01F);
}

// Saves its output, reads the save's memory without an operation, and returns the save as the gradient.
struct ReturnsItsOutput : torch::autograd::Function<ReturnsItsOutput> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    at::Tensor out = x * 2;
    context->save_for_backward({out});
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list /*gradients*/) {
    at::Tensor saved = context->get_saved_variables()[0];
    TORCH_CHECK(saved.const_data_ptr<float>()[0] == -2, "the saved bytes are not where they were");
    return {saved};
  }
};

TEST_CASE("a gradient that is a saved tensor's memory stays where the save finds it", "[managed]") {
  const auto train = [](Offloader* offloader) {
    const at::Tensor weight = at::linspace(-1, 1, kWidth * kWidth).view({kWidth, kWidth}).requires_grad_();
    const at::Tensor other = at::ones({kWidth, kWidth}).requires_grad_();
    if (offloader != nullptr) {
      offloader->manage({weight, other}, within(0));
    }
    at::Tensor loss;
    {
      const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
      loss = (other * other).sum();  // goes backward after the save has been handed out, and has the gradient looked at
      loss = loss + ReturnsItsOutput::apply(weight).sum();
    }
    Tensors gradients;
    for (const bool retain : {true, true, false}) {
      torch::autograd::backward({loss}, {}, retain);
      gradients.push_back(std::exchange(weight.mutable_grad(), at::Tensor()));
    }
    return at::stack(gradients).clone();
  };
  Rig rig(late_without_stash());
  CHECK(train(nullptr).equal(train(&rig.offloader())));
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
  for (const Both& optimizer : ours_and_libtorchs()) {
    INFO(optimizer.name);
    const Tensors plain = make_weights(dtype);
    const auto in_step = optimizer.libtorchs(plain);
    const Tensors expected = train_without_accumulation(plain, *in_step, 0, kSteps);
    Rig rig(late_without_stash());
    const Tensors weights = make_weights(dtype);
    if (managed_first) {
      rig.offloader().manage(weights, within(kBytes));
    }
    const auto in_backward = optimizer.ours(weights, UpdateIn::kBackward);
    if (!managed_first) {
      rig.offloader().manage(weights, within(kBytes));
    }
    check_equal(expected, train_without_accumulation(weights, *in_backward, 0, kSteps));  // step() finds no gradient
  }
}

TEST_CASE("updates at the next use have the bits of updates in step", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const auto make = [&](UpdateIn update) -> MakeOptimizer {
    return [options, update](const Tensors& weights) { return std::make_unique<AdamW>(weights, options, update); };
  };
  const Tensors expected = train(make_weights(dtype), make(UpdateIn::kStep), nullptr);
  check_equal(expected, train(make_weights(dtype), make(UpdateIn::kNextUse), nullptr));  // nothing is managed
  Parameters some_stay = within(2 * kBytes);
  some_stay.resident_bytes = 3 * kBytes;
  for (const Parameters& how : {within(0), within(5 * kBytes), some_stay}) {
    for (const Setting& setting : some_settings()) {
      INFO(setting.name << ", bound " << how.device_bytes.value_or(0));
      Rig rig(setting);
      const Tensors weights = make_weights(dtype);
      rig.offloader().manage(weights, how);
      check_equal(expected, train(weights, make(UpdateIn::kNextUse), &rig.offloader()));
    }
  }
}

TEST_CASE("updates on the CPU have the same bits wherever the bytes are, and whenever they are updated", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const std::uint64_t bound = GENERATE(std::uint64_t{0}, 5 * kBytes);
  const std::vector<Both> all = ours_and_libtorchs();
  for (const Both& optimizer : {all[1], all[5]}) {  // with three states and with one
    const auto make = [&](UpdateIn update_in) -> MakeOptimizer {
      return [&, update_in](const Tensors& weights) { return optimizer.make(weights, update_in, UpdateOn::kCpu); };
    };
    const Tensors expected = train(make_weights(dtype), make(UpdateIn::kStep), nullptr);
    const Tensors plain = make_weights(dtype);
    const Tensors expected_of_backward = train_without_accumulation(plain, *make(UpdateIn::kStep)(plain), 0, kSteps);
    for (const Setting& setting : some_settings()) {
      INFO(optimizer.name << ", " << setting.name << ", bound " << bound);
      for (const UpdateIn update_in : {UpdateIn::kStep, UpdateIn::kNextUse}) {
        Rig rig(setting);
        const Tensors weights = make_weights(dtype);
        rig.offloader().manage(weights, within(bound));
        check_equal(expected, train(weights, make(update_in), &rig.offloader()));
      }
      Rig rig(setting);
      const Tensors weights = make_weights(dtype);
      rig.offloader().manage(weights, within(bound));
      const auto in_backward = make(UpdateIn::kBackward)(weights);
      check_equal(expected_of_backward, train_without_accumulation(weights, *in_backward, 0, kSteps));
    }
  }
}

// A weight whose first state is there, and a gradient that is at home.
struct OneWeight {
  explicit OneWeight(Rig& rig, UpdateIn update_in, at::ScalarType dtype = at::kFloat,
                     UpdateOn update_on = UpdateOn::kDevice)
      : weight((at::arange(kWidth, at::kFloat) / kWidth).to(dtype).requires_grad_()),
        optimizer((rig.offloader().manage({weight}, within(0)), std::vector{weight}), torch::optim::AdamWOptions(0.1),
                  update_in, update_on) {
    backward(1);
    optimizer.step();
    optimizer.zero_grad();
  }

  void backward(double factor) const { torch::autograd::backward({(weight * factor).sin().to(at::kFloat).sum()}); }
  [[nodiscard]] at::Tensor value() const {
    const at::NoGradGuard no_grad;
    return weight.clone();
  }

  at::Tensor weight;
  AdamW optimizer;
};

TEST_CASE("whatever a program does after a step, an update at the next use is the update in step", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const std::vector<std::pair<std::string, std::function<void(OneWeight&)>>> programs{
      {"reads", [](OneWeight&) {}},
      {"writes its gradient", [](OneWeight& one) { one.weight.mutable_grad().mul_(100); }},
      {"sets its gradient to zero", [](OneWeight& one) { one.optimizer.zero_grad(/*set_to_none=*/false); }},
      {"lets go of its gradient", [](OneWeight& one) { one.weight.mutable_grad().reset(); }},
      {"accumulates another gradient", [](OneWeight& one) { one.backward(3); }},
      {"steps once more", [](OneWeight& one) { one.optimizer.step(); }},
      {"changes options", [](OneWeight& one) { one.optimizer.param_groups().front().options().set_lr(7); }},
      {"writes the weight",
       [](OneWeight& one) {
         const at::NoGradGuard no_grad;
         one.weight.mul_(2);
       }},
      {"gives the weight another storage",
       [](OneWeight& one) { one.weight.set_data(at::ones({kWidth}, one.weight.options())); }},
      {"gives the storage other sizes",
       [](OneWeight& one) {
         at::Tensor data = one.weight.data();
         data.resize_({2 * kWidth});
         data.resize_({kWidth});
       }},
      {"evaluates in inference mode",
       [](OneWeight& one) {
         const c10::InferenceMode inference;
         static_cast<void>((one.weight * 2).sum());
       }},
      {"evaluates under autocast",
       [](OneWeight& one) {
         at::autocast::set_autocast_enabled(at::kCPU, true);
         const auto off = c10::make_scope_exit([] { at::autocast::set_autocast_enabled(at::kCPU, false); });
         static_cast<void>((one.weight * 2).sum());
       }},
      {"evaluates without gradients",
       [](OneWeight& one) {
         const at::NoGradGuard no_grad;
         static_cast<void>((one.weight * 2).sum());
       }},
  };
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  for (const auto& [name, program] : programs) {
    std::vector<at::Tensor> values;
    for (const UpdateIn update_in : {UpdateIn::kStep, UpdateIn::kNextUse}) {
      INFO(name);
      Rig rig(update_on == UpdateOn::kCpu ? late_without_stash() : disk());
      OneWeight one(rig, update_in, dtype, update_on);
      one.backward(2);
      one.optimizer.step();
      program(one);
      values.push_back(one.value());
      one.backward(1);
      one.optimizer.step();
      values.push_back(one.value());
    }
    CHECK(at::equal(values[0], values[2]));
    CHECK(at::equal(values[1], values[3]));
    CHECK_FALSE(at::equal(values[0], values[1]));
  }
}

TEST_CASE("a graph from before a step is refused after it, before the update, too", "[managed]") {
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  for (const UpdateIn update : {UpdateIn::kStep, UpdateIn::kNextUse}) {
    Rig rig(GENERATE(0, 1) == 0 ? disk() : late_without_stash());
    const OneWeight one(rig, update, at::kFloat, update_on);
    const at::Tensor loss = (one.weight * one.weight).sum();
    one.backward(1);
    const_cast<AdamW&>(one.optimizer).step();
    CHECK_THROWS_WITH(torch::autograd::backward({loss}), Catch::Contains("modified by an inplace operation"));
  }
}

TEST_CASE("what uses a storage while another thread updates it waits", "[managed]") {
  Rig rig(disk());
  OneWeight one(rig, UpdateIn::kNextUse);
  const OneWeight expected(rig, UpdateIn::kStep);
  for (int i = 0; i < 50; ++i) {
    for (const OneWeight* each : {&std::as_const(one), &expected}) {
      each->backward(1 + i);
      const_cast<AdamW&>(each->optimizer).step();
    }
    const at::Tensor updated = expected.value();
    std::vector<at::Tensor> seen(2);
    std::thread other([&] { seen[0] = one.value(); });
    seen[1] = one.value();
    other.join();
    CHECK(at::equal(seen[0], updated));
    CHECK(at::equal(seen[1], updated));
  }
}

TEST_CASE("an update that nobody can see any more is dropped with all it holds", "[managed]") {
  Rig rig(disk());
  {
    OneWeight one(rig, UpdateIn::kNextUse);
    one.backward(1);
    one.optimizer.step();
    one.optimizer.zero_grad();
    CHECK(rig.stats().managed.tensors == 4);  // with the gradient, which the update holds
  }
  CHECK(rig.stats().managed.tensors == 0);
}

TEST_CASE("states that the program holds are updated without their parameter", "[managed]") {
  Tensors found;
  for (const UpdateIn update : {UpdateIn::kStep, UpdateIn::kNextUse}) {
    Rig rig(disk());
    at::Tensor moment;
    {
      OneWeight one(rig, update, at::kBFloat16);
      one.backward(2);
      one.optimizer.step();
      moment = dynamic_cast<const OptimizerState&>(*one.optimizer.state().begin()->second).parts.front().at("exp_avg");
    }
    CHECK(rig.stats().managed.tensors > 0);  // looks for what has ended
    found.push_back(moment.clone());
    moment.reset();
    CHECK(rig.stats().managed.tensors == 0);
  }
  CHECK(at::equal(found[0], found[1]));
}

TEST_CASE("homes of updates that nobody can see any more are given to others", "[managed]") {
  Setting setting = disk();
  setting.options.capacity_bytes = 5 * kBytes;
  Rig rig(setting);
  {
    const at::Tensor weight = at::ones({kWidth, kWidth}).requires_grad_();
    rig.offloader().manage({weight}, within(0));
    AdamW optimizer({weight}, {}, UpdateIn::kNextUse);
    for (int step = 0; step < 2; ++step) {
      torch::autograd::backward({weight.sin().sum()});
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  const at::Tensor other = at::ones({5 * kWidth, kWidth});
  rig.offloader().manage({other}, within(0));
  CHECK(is_away(other));
}

TEST_CASE("an update that throws half-way is over, and one for which there is no room is tried again", "[managed]") {
  Rig rig(disk());
  const at::Tensor target = at::ones({kWidth});
  const at::Tensor other = at::ones({kWidth});
  rig.offloader().manage({target, other}, within(0));
  int runs = 0;
  const auto work = [&](const Tensors& tensors, bool /*has_target*/) {
    tensors[0].add_(tensors[1]);
    if (++runs == 1) {
      throw std::runtime_error("half-way");
    }
  };
  REQUIRE(postpone(target, {other}, work) != nullptr);
  CHECK_THROWS_WITH(target.sum(), "half-way");
  CHECK(target.sum().item<float>() == 2 * kWidth);
  CHECK(runs == 1);
  REQUIRE(postpone(target, {other}, work) != nullptr);
  rig.offloader().manage({at::ones({kWidth})}, within(0));  // sends the others home
  {
    const PlannedFault refused(FaultPoint::kDeviceAllocation, 1, FaultPlan::Extent::kFromThenOn);
    CHECK_THROWS_AS(target.sum(), c10::OutOfMemoryError);
  }
  CHECK(runs == 1);
  CHECK(target.sum().item<float>() == 3 * kWidth);
  CHECK(runs == 2);
}

TEST_CASE("an update goes on without its optimizer", "[managed]") {
  Rig rig(disk());
  at::Tensor weight;
  at::Tensor updated;
  {
    OneWeight in_step(rig, UpdateIn::kStep);
    OneWeight one(rig, UpdateIn::kNextUse);
    for (OneWeight* const each : {&in_step, &one}) {
      each->backward(2);
      each->optimizer.step();
    }
    updated = in_step.value();
    weight = one.weight;
  }
  const at::NoGradGuard no_grad;
  CHECK(at::equal(weight.clone(), updated));
}

TEST_CASE("training goes on from a saved AdamW with the same bits", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(GENERATE(false, true));
  const Tensors plain = make_weights(dtype);
  AdamW resident(plain, options);
  const Tensors expected = train_without_accumulation(plain, resident, 0, kSteps);

  Rig rig(disk());
  {
    std::string saved;
    Tensors halfway;
    {
      const Tensors weights = make_weights(dtype);
      rig.offloader().manage(weights, within(0));
      AdamW optimizer(weights, options);
      halfway = train_without_accumulation(weights, optimizer, 0, kSteps / 2);
      saved = archive_of(optimizer);
    }
    Tensors weights;
    for (const at::Tensor& each : halfway) {
      weights.push_back(each.clone().requires_grad_());
    }
    rig.offloader().manage(weights, within(0));
    AdamW optimizer(weights, torch::optim::AdamWOptions(7));  // what is loaded says how
    load_archive(saved, optimizer);
    for (const auto& [key, state] : optimizer.state()) {
      CHECK(is_managed(dynamic_cast<const OptimizerState&>(*state).parts.front().at("exp_avg")));
    }
    check_equal(expected, train_without_accumulation(weights, optimizer, kSteps / 2, kSteps));
  }
}

TEST_CASE("states of LibTorch's optimizer of bfloat16 weights become float32 beside a master", "[managed]") {
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  const at::Tensor weight = at::ones({kWidth, kWidth}, at::kBFloat16).requires_grad_();
  const auto step = [&](torch::optim::Optimizer& optimizer) {
    weight.mutable_grad() = at::full_like(weight, 0.5);
    optimizer.step();
  };
  torch::optim::AdamW theirs({weight}, {});
  step(theirs);
  AdamW ours({weight}, {}, UpdateIn::kStep, update_on);
  load_archive(archive_of(theirs), ours);
  step(ours);
  const auto& part = dynamic_cast<const OptimizerState&>(*ours.state().begin()->second).parts.front();
  CHECK(part.contains("master"));
  for (const auto& [name, state] : part) {
    INFO(name);
    CHECK(state.scalar_type() == at::kFloat);
  }
}

TEST_CASE("states that options ask for later are made then", "[managed]") {
  const UpdateIn update = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse);
  Rig rig(disk());
  const Tensors plain = make_weights(at::kFloat);
  const Tensors weights = make_weights(at::kFloat);
  rig.offloader().manage(weights, within(kBytes));
  const Both sgd = both<torch::optim::SGD>("SGD", torch::optim::SGDOptions(1e-2));
  const auto ours = sgd.ours(weights, update);
  const auto expected = sgd.libtorchs(plain);
  train_without_accumulation(plain, *expected, 0, 2);
  train_without_accumulation(weights, *ours, 0, 2);
  for (auto* optimizer : {ours.get(), expected.get()}) {
    for (torch::optim::OptimizerParamGroup& group : optimizer->param_groups()) {
      dynamic_cast<torch::optim::SGDOptions&>(group.options()).momentum(0.9).dampening(0.5);
    }
  }
  check_equal(train_without_accumulation(plain, *expected, 2, 6), train_without_accumulation(weights, *ours, 2, 6));
}

// As train(), from step `first` to before `last`.
void train_on(const Tensors& weights, AdamW& optimizer, int first, int last, Offloader* offloader) {
  for (int step = first; step < last; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      const at::Tensor input = at::arange(4 * kWidth, at::kFloat).view({4, kWidth}).sin() + 0.1 * (step + i);
      const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
      torch::autograd::backward({loss_of(weights, input.to(weights.front().scalar_type()))});
    }
    torch::nn::utils::clip_grad_norm_(weights, 1.0);
    for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      group.options().set_lr(1e-2 / (1 + step / 5));
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

// All that a training goes on from: copies of the weights, then of each weight's states.
Tensors all_of(const Tensors& weights, AdamW& optimizer) {
  const at::NoGradGuard no_grad;
  Tensors all;
  for (const at::Tensor& weight : weights) {
    all.push_back(weight.clone());
    const auto& state = dynamic_cast<const OptimizerState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
    CHECK(state.step == kSteps);
    for (const auto& part : state.parts) {
      for (const auto& [name, tensor] : part) {
        all.push_back(tensor.clone());
      }
    }
  }
  return all;
}

std::string saved(const Tensors& weights, const AdamW& optimizer) {
  const at::NoGradGuard no_grad;
  torch::serialize::OutputArchive archive;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    archive.write("weight" + std::to_string(i), weights[i].clone());
  }
  torch::serialize::OutputArchive states;
  optimizer.save(states);
  archive.write("optimizer", states);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void load(const std::string& bytes, const Tensors& weights, AdamW& optimizer) {
  const at::NoGradGuard no_grad;
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    at::Tensor weight;
    archive.read("weight" + std::to_string(i), weight);
    at::Tensor to = weights[i];
    to.copy_(weight);
  }
  torch::serialize::InputArchive states;
  archive.read("optimizer", states);
  optimizer.load(states);
}

TEST_CASE("training that is saved and resumed on the way ends with a resident run's weights and states", "[managed]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const UpdateIn update = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse);
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  const Tensors plain = make_weights(dtype);
  AdamW resident(plain, options);
  train_on(plain, resident, 0, kSteps, nullptr);
  const Tensors expected = all_of(plain, resident);

  Parameters some_stay = within(2 * kBytes);
  some_stay.resident_bytes = 7 * kBytes;
  Parameters states_only = within(kBytes);
  states_only.weights = false;
  states_only.gradients = false;
  Parameters no_states = within(kBytes);
  no_states.states = false;
  for (const Parameters& how : {within(0), within(5 * kBytes), some_stay, states_only, no_states}) {
    for (Setting setting : some_settings()) {
      for (const Home home : {Home::kAuto, Home::kHost}) {
        if (home == Home::kHost && setting.schedule) {
          continue;  // a simulated tier is its own home
        }
        setting.options.home = home;
        INFO(setting.name << ", bound " << how.device_bytes.value_or(0) << ", in memory " << (home == Home::kHost));
        Rig rig(setting);
        std::string checkpoint;
        {
          const Tensors weights = make_weights(dtype);
          rig.offloader().manage(weights, how);
          AdamW optimizer(weights, options, update);
          train_on(weights, optimizer, 0, kSteps / 2, &rig.offloader());
          checkpoint = saved(weights, optimizer);
        }
        const Tensors weights = make_weights(dtype);
        rig.offloader().manage(weights, how);
        AdamW optimizer(weights, options, update);
        load(checkpoint, weights, optimizer);
        train_on(weights, optimizer, kSteps / 2, kSteps, &rig.offloader());
        check_equal(expected, all_of(weights, optimizer));
        for (const at::Tensor& weight : weights) {
          CHECK((how.weights || !is_away(weight)));
        }
      }
    }
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

TEST_CASE("updates in backward refuse a second gradient before step(), and lose nothing") {
  Tensors weights = make_weights(at::kFloat);
  AdamW optimizer(weights, {}, UpdateIn::kBackward);
  const auto backward = [&] { torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))}); };
  backward();
  const auto copies = [&] {
    Tensors all;
    for (const at::Tensor& weight : weights) {
      all.push_back(weight.detach().clone());
    }
    return all;
  };
  const Tensors updated = copies();
  CHECK_THROWS_WITH(backward(), Catch::Contains("second gradient"));
  check_equal(updated, copies());
  CHECK(std::ranges::any_of(weights, [](const at::Tensor& weight) { return weight.grad().defined(); }));
  optimizer.zero_grad();
  CHECK_NOTHROW(backward());
  optimizer.step();
  CHECK_NOTHROW(backward());
}

TEST_CASE("a state that outlives its parameter is right, or an error where it takes the parameter's values",
          "[managed]") {
  for (const Both& optimizer : ours_and_libtorchs()) {
    INFO(optimizer.name);
    std::vector<at::Tensor> states;
    for (const UpdateIn update_in : {UpdateIn::kStep, UpdateIn::kNextUse}) {
      Rig rig(disk());
      Tensors weights{make_weights(at::kFloat).front()};
      rig.offloader().manage(weights, within(0));
      auto ours = optimizer.ours(weights, update_in);
      for (int step = 0; step < 3; ++step) {
        torch::autograd::backward({weights.front().sin().sum()});
        ours->step();
        ours->zero_grad();
      }
      const auto parts = dynamic_cast<const OptimizerState&>(*ours->state().begin()->second).parts;
      if (parts.front().empty()) {
        continue;
      }
      ours.reset();
      weights.clear();
      try {
        states.push_back(parts.front().begin()->second.clone());
      } catch (const c10::Error& error) {
        CHECK_THAT(error.what(), Catch::Contains("parameter has ended"));
        CHECK(update_in == UpdateIn::kNextUse);
        CHECK_THROWS_WITH(parts.front().begin()->second.clone(), Catch::Contains("parameter has ended"));
      }
    }
    CHECK((states.size() < 2 || at::equal(states[0], states[1])));
  }
}

TEST_CASE("a gradient in its weight's own storage lets both end", "[managed]") {
  Rig rig(disk());
  {
    OneWeight one(rig, UpdateIn::kNextUse);
    one.weight.mutable_grad() = one.weight.detach();
    one.optimizer.step();
    one.weight.mutable_grad().reset();
  }
  forget_ended_storages();
  CHECK(rig.stats().managed.tensors == 0);
}

TEST_CASE("a first step in inference mode is a step as any other", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse);
  const auto train = [update_in](const at::Tensor& weight, bool inference) {
    AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), update_in);
    for (int step = 0; step < 3; ++step) {
      torch::autograd::backward({weight.sin().sum()});
      const c10::InferenceMode mode(inference);
      optimizer.step();
      optimizer.zero_grad();
    }
    const at::NoGradGuard no_grad;
    return weight.clone();
  };
  Rig rig(disk());
  const at::Tensor plain = at::ones({kWidth}).requires_grad_();
  const at::Tensor weight = at::ones({kWidth}).requires_grad_();
  rig.offloader().manage({weight}, within(0));
  CHECK(at::equal(train(weight, true), train(plain, false)));
}

TEST_CASE("an archive leaves states alone that it does not have") {
  const Tensors weights{at::ones({4, (1 << 22) + 5}).requires_grad_(), at::ones({8}).requires_grad_()};  // one in parts
  AdamW optimizer(weights, torch::optim::AdamWOptions(0.1), UpdateIn::kNextUse);
  weights[1].mutable_grad() = at::ones({8});
  optimizer.step();
  const std::string of_the_second = archive_of(optimizer);
  weights[0].mutable_grad() = at::ones_like(weights[0]).to_sparse();
  CHECK_THROWS_WITH(optimizer.step(), Catch::Contains("sparse"));
  weights[0].mutable_grad().reset();
  load_archive(of_the_second, optimizer);
  weights[0].mutable_grad() = at::ones_like(weights[0]);
  optimizer.step();
  load_archive(of_the_second, optimizer);
  CHECK_NOTHROW(optimizer.step());
  const auto& state = dynamic_cast<const OptimizerState&>(*optimizer.state().at(weights[0].unsafeGetTensorImpl()));
  CHECK(state.step == 2);
  CHECK(state.parts.size() == 2);
}

TEST_CASE("an archive whose states have other sizes is refused, and changes nothing") {
  const auto make = [](std::int64_t rows) { return Tensors{at::ones({rows, 4}).requires_grad_()}; };
  const Tensors weights = make(8);
  const Tensors others = make(6);
  AdamW optimizer(weights, torch::optim::AdamWOptions(0.1));
  AdamW other(others, torch::optim::AdamWOptions(0.7));
  for (const auto& each : {weights, others}) {
    each.front().mutable_grad() = at::ones_like(each.front());
  }
  optimizer.step();
  other.step();
  CHECK_THROWS_WITH(load_archive(archive_of(other), optimizer), Catch::Contains("sizes"));
  CHECK(optimizer.param_groups().front().options().get_lr() == 0.1);
  CHECK_NOTHROW(optimizer.step());
  CHECK(dynamic_cast<const OptimizerState&>(*optimizer.state().begin()->second).step == 2);
}

TEST_CASE("a parameter that has other sizes than its states is refused") {
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  const at::Tensor weight = at::ones({4, 6}).requires_grad_();
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), UpdateIn::kStep, update_on);
  weight.mutable_grad() = at::ones({4, 6});
  optimizer.step();
  weight.mutable_grad().reset();
  weight.set_data(at::ones({6, 2}));
  weight.mutable_grad() = at::ones({6, 2});
  CHECK_THROWS_WITH(optimizer.step(), Catch::Contains("other sizes"));
  CHECK(at::equal(weight.detach(), at::ones({6, 2})));
}

// Whether an optimizer throws that gets another optimizer's options, or LibTorch has replaced these by its own: newer
// versions merge a group's options with the defaults.
template <typename Options>
bool refuses_others_options(const std::function<std::unique_ptr<torch::optim::Optimizer>()>& make) {
  try {
    const auto optimizer = make();
    return dynamic_cast<const Options*>(&optimizer->param_groups().back().options()) != nullptr;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

TEST_CASE("options that a program has changed or added are checked in step()") {
  const Tensors weights = make_weights(at::kFloat);
  AdamW optimizer(weights);
  optimizer.param_groups().front().options().set_lr(-1);
  CHECK_THROWS_AS(optimizer.step(), std::invalid_argument);
  optimizer.param_groups().front().options().set_lr(1);
  CHECK_NOTHROW(optimizer.step());
  CHECK(refuses_others_options<torch::optim::AdamWOptions>([&] {
    auto other = std::make_unique<AdamW>(weights);
    other->add_param_group({Tensors{at::ones({2})}, std::make_unique<torch::optim::SGDOptions>(1)});
    other->step();
    return other;
  }));
}

TEST_CASE("ebb's optimizers refuse what they cannot do") {
  namespace optim = torch::optim;
  const Tensors weights = make_weights(at::kFloat);
  CHECK_THROWS_AS(AdamW(weights, optim::AdamWOptions(-1)), std::invalid_argument);
  CHECK_THROWS_AS(AdamW(weights, optim::AdamWOptions(1).betas({0.9, 1})), std::invalid_argument);
  CHECK_THROWS_AS(Adam(weights, optim::AdamOptions(1).eps(-1)), std::invalid_argument);
  CHECK_THROWS_AS(SGD(weights, optim::SGDOptions(1).momentum(-1)), std::invalid_argument);
  CHECK_THROWS_AS(SGD(weights, optim::SGDOptions(1).nesterov(true)), std::invalid_argument);
  const std::vector<optim::OptimizerParamGroup> others{{weights, std::make_unique<optim::SGDOptions>(1)}};
  CHECK(refuses_others_options<optim::AdamWOptions>([&] { return std::make_unique<AdamW>(others); }));
  CHECK(refuses_others_options<optim::AdamOptions>([&] { return std::make_unique<Adam>(others); }));
  AdamW optimizer(weights);
  weights[0].mutable_grad() = at::ones({kWidth, kWidth}).to_sparse();
  CHECK_THROWS_WITH(optimizer.step(), Catch::Contains("sparse"));
  for (const UpdateOn update_on : {UpdateOn::kDevice, UpdateOn::kCpu}) {
    const at::Tensor table = at::ones({8, 4}).requires_grad_();
    AdamW in_backward({table}, optim::AdamWOptions(1), UpdateIn::kBackward, update_on);
    CHECK_THROWS_WITH(
        torch::autograd::backward({at::embedding(table, at::zeros({2}, at::kLong), -1, false, true).sum()}),
        Catch::Contains("does not support gradients that are sparse"));
  }
}

at::Tensor large_weight() {  // of parts of three rows and of one
  at::manual_seed(1);
  return at::randn({4, (1 << 22) + 5}).requires_grad_();
}

void update_once(const at::Tensor& weight, torch::optim::Optimizer& optimizer) {
  weight.mutable_grad() = weight.detach().sin();
  optimizer.step();
}

TEST_CASE("an update in parts has the bits of an update at once, and goes on from an archive", "[managed]") {
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true);
  const at::Tensor plain = large_weight();
  torch::optim::AdamW expected({plain}, options);
  Rig rig(disk());
  {
    at::Tensor weight = large_weight();
    std::string saved;
    {
      rig.offloader().manage({weight}, within(0));
      AdamW optimizer({weight}, options);
      update_once(plain, expected);
      update_once(weight, optimizer);
      const auto& state = dynamic_cast<const OptimizerState&>(*optimizer.state().begin()->second);
      REQUIRE(state.parts.size() == 2);
      CHECK(is_away(state.parts[0].at("exp_avg")));  // while the last part is here
      saved = archive_of(optimizer);
    }
    weight = weight.detach().clone().requires_grad_();
    rig.offloader().manage({weight}, within(0));
    AdamW optimizer({weight}, torch::optim::AdamWOptions(7));
    load_archive(saved, optimizer);
    update_once(plain, expected);
    update_once(weight, optimizer);
    CHECK(at::equal(weight.detach(), plain.detach()));
  }
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
    {
      const OptimizerStep makes_states(optimizer);
      optimizer.step();
    }
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

TEST_CASE("a backward pass amid another leaves the other's gradients alone", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    const at::Tensor& first = weights[0];
    const at::Tensor& last = weights[1];
    const at::Tensor amid = at::ones({kWidth, kWidth}).requires_grad_();
    rig.offloader().manage({first, last, amid}, within(0));
    const at::Tensor x = at::ones({4, kWidth}).matmul(first);
    bool last_was_whole = false;
    x.register_hook([&](const at::Tensor& /*gradient*/) {
      last_was_whole = last.grad().defined();
      std::thread([&] { torch::autograd::backward({amid.sum()}); }).join();
    });
    torch::autograd::backward({x.matmul(last).sum()});
    REQUIRE(last_was_whole);
    CHECK(is_managed(last.grad()));
    CHECK(is_managed(first.grad()));
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

TEST_CASE("a gradient that the program holds stays", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(0));
    Tensors held;
    for (const at::Tensor& weight : weights) {
      weight.mutable_grad() = at::ones_like(weight.detach().clone());
      held.push_back(weight.grad());
    }
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    for (const at::Tensor& gradient : held) {
      CHECK_FALSE(is_managed(gradient));
      CHECK(gradient.data_ptr() != nullptr);
    }
    held.clear();
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    for (const at::Tensor& weight : weights) {
      CHECK(is_managed(weight.grad()));
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

TEST_CASE("what is made like a parameter is a state in a step of its optimizer's alone", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(0));
    const torch::optim::SGD optimizer({weights[0]}, torch::optim::SGDOptions(0.1));
    const auto is_program_s = [](const at::Tensor& made) { return !is_managed(made) && made.data_ptr() != nullptr; };
    {
      const at::NoGradGuard no_grad;
      CHECK(is_program_s(at::zeros_like(weights[0])));
      const OptimizerStep step(optimizer);
      CHECK(is_managed(at::zeros_like(weights[0])));
      CHECK(is_managed(at::full_like(weights[0], 0.5)));
      CHECK(is_program_s(at::zeros_like(weights[1])));
      CHECK(is_program_s(at::zeros_like(weights[0].detach())));
      CHECK(is_program_s(at::empty_like(weights[0])));
      CHECK(std::async(std::launch::async, [&] {
              const at::NoGradGuard none;
              return is_program_s(at::zeros_like(weights[0]));
            }).get());
      const OptimizerStep inner({weights[1]});
      CHECK(is_managed(at::ones_like(weights[0])));
      CHECK(is_managed(at::ones_like(weights[1])));
      const at::AutoGradMode with_gradients(true);
      CHECK(is_program_s(at::zeros_like(weights[0])));  // in a closure's model
    }
    const at::NoGradGuard no_grad;
    CHECK(is_program_s(at::zeros_like(weights[0])));
  }
}

TEST_CASE("states are within the bound from the step on that makes them", "[managed]") {
  Rig rig(disk());
  {
    const Tensors weights = make_weights(at::kFloat);
    rig.offloader().manage(weights, within(2 * kBytes));
    torch::optim::AdamW optimizer(weights, {});
    torch::autograd::backward({loss_of(weights, at::ones({4, kWidth}))});
    rig.offloader().reset_stats();
    const OptimizerStep makes_states(optimizer);
    optimizer.step();
    CHECK(rig.offloader().stats().managed.tensors == 4 * weights.size());
    CHECK(rig.offloader().stats().managed_on_device.peak_bytes <= 6 * kBytes);  // of one weight, and what leaves
  }
}

}  // namespace
}  // namespace ebb
