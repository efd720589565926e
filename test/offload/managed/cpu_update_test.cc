// Updates by the CPU, of bytes where they are at home.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/base/gradient_hook.h"
#include "offload/managed/postpone.h"
#include "offload/managed/uses.h"
#include "offload/optimizer.h"
#include "offload/optimizer/update_rule.h"
#include "offload/optimizer/updates.h"
#include "offload/parameters.h"
#include "test/checked/fault_plan.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/rig.h"

namespace ebb {
namespace {

using test::is_away;
using test::within;

using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kFloats = 4096;
constexpr std::uint64_t kBytes = kFloats * sizeof(float);

at::Tensor make_weight(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(1);
  return at::randn({kFloats}).to(dtype).requires_grad_();
}

void backward(const at::Tensor& weight) { torch::autograd::backward({(weight * 3).sin().to(at::kFloat).sum()}); }

at::Tensor value_of(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  return weight.clone();
}

TEST_CASE("tensors are used at home where all of them are there, in memory, and not in use", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor first = make_weight();
  const at::Tensor second = make_weight();
  const at::Tensor expected = value_of(first);
  rig.offloader().manage({first, second}, within(0));
  {
    const auto home = use_at_home({first, second});
    REQUIRE(home != nullptr);
    CHECK(is_away(first));
    CHECK(at::equal((*home)[0], expected));
    const at::NoGradGuard no_grad;
    (*home)[1].mul_(2);
  }
  CHECK(at::equal(value_of(second), expected * 2));
  {
    const auto home = use_at_home({second.detach().slice(0, 5, 20, 3)});
    REQUIRE(home != nullptr);
    CHECK(at::equal((*home)[0], (expected * 2).slice(0, 5, 20, 3)));
  }
  CHECK(use_at_home({first, at::ones({kFloats})}) == nullptr);  // one is not managed
  CHECK_FALSE(is_away(first + second));
  {
    const Uses used(at::TensorList{second});
    CHECK(use_at_home({first, second}) == nullptr);
  }
}

TEST_CASE("a resident tensor is not used at home", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor weight = make_weight();
  const at::Tensor expected = value_of(weight);
  Parameters stays = within(0);
  stays.resident_bytes = 10 * kBytes;
  rig.offloader().manage({weight}, stays);
  CHECK(use_at_home({weight}) == nullptr);
  CHECK(at::equal(value_of(weight), expected));
}

TEST_CASE("files are no homes to compute in", "[managed]") {
  Rig rig(disk());
  const at::Tensor weight = make_weight();
  const at::Tensor expected = value_of(weight);
  rig.offloader().manage({weight}, within(0));
  CHECK(use_at_home({weight}) == nullptr);
  CHECK(at::equal(value_of(weight), expected));
}

TEST_CASE("an error of work that was done ahead comes from the next use, once", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor target = at::ones({kFloats});
  const at::Tensor other = at::ones({kFloats});
  rig.offloader().manage({target, other}, within(0));
  const auto half_way = [](const Tensors& tensors, bool /*has_target*/) {
    tensors.front().add_(1);
    throw std::runtime_error("half-way");
  };
  const auto work = postpone(target, {other}, half_way, WorkAt::kHome);
  REQUIRE(work != nullptr);
  work->run_ahead();
  CHECK_THROWS_WITH(other.sum(), "half-way");
  CHECK(target.sum().item<float>() == 2 * kFloats);
  CHECK(other.sum().item<float>() == kFloats);
}

TEST_CASE("an update whose parameter finds no room on the device has not begun", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor target = at::zeros({kFloats});
  const at::Tensor state = at::zeros({kFloats});
  rig.offloader().manage({target, state}, within(100 * kBytes));
  const Uses used(at::TensorList{state});  // so that the update cannot be done at home
  int runs = 0;
  const auto count = [&](const Tensors& tensors, bool /*has_target*/) {
    ++runs;
    tensors.front().add_(1);
  };
  const auto work = postpone(target, {state}, count, WorkAt::kHome);
  REQUIRE(work != nullptr);
  {
    const PlannedFault refused(FaultPoint::kDeviceAllocation, 1, FaultPlan::Extent::kFromThenOn);
    work->run_ahead();
    CHECK_THROWS_AS(target.sum(), c10::OutOfMemoryError);
  }
  CHECK(runs == 0);
  CHECK(target.sum().item<float>() == kFloats);
  CHECK(runs == 1);
}

TEST_CASE("an update on the CPU has the same bits where a state is in use when its turn comes", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kBackward, UpdateIn::kNextUse);
  const bool gradients = GENERATE(false, true);
  Rig rig(late_without_stash());
  const at::Tensor plain = make_weight();
  const at::Tensor weight = make_weight();
  Parameters how = within(100 * kBytes);
  how.gradients = gradients;
  rig.offloader().manage({weight}, how);
  AdamW expected({plain}, torch::optim::AdamWOptions(0.1), update_in, UpdateOn::kCpu);
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), update_in, UpdateOn::kCpu);
  for (int step = 0; step < 3; ++step) {
    const auto known = optimizer.state().find(weight.unsafeGetTensorImpl());
    std::unique_ptr<Uses> used;
    if (known != optimizer.state().end()) {
      const auto& state = dynamic_cast<const OptimizerState&>(*known->second);
      used = std::make_unique<Uses>(at::TensorList{state.parts.front().at("exp_avg")});
    }
    for (AdamW* const each : {&expected, &optimizer}) {
      backward(each == &expected ? plain : weight);
      each->step();
      each->zero_grad();
    }
    CHECK(at::equal(value_of(weight), value_of(plain)));
  }
}

TEST_CASE("updates go on without the optimizer whose thread has not come to them", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kBackward, UpdateIn::kNextUse);
  const auto train = [update_in](const std::vector<at::Tensor>& weights) {
    AdamW optimizer(weights, torch::optim::AdamWOptions(0.1), update_in, UpdateOn::kCpu);
    for (int step = 0; step < 3; ++step) {
      for (const at::Tensor& each : weights) {
        backward(each);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  const at::Tensor plain = make_weight();
  train({plain});
  for (int i = 0; i < 20; ++i) {
    Rig rig(late_without_stash());
    std::vector<at::Tensor> weights;
    for (int each = 0; each < 5; ++each) {
      weights.push_back(make_weight());
    }
    rig.offloader().manage(weights, within(0));
    train(weights);
    for (const at::Tensor& each : weights) {
      CHECK(at::equal(value_of(each), value_of(plain)));
    }
  }
}

TEST_CASE("states stay at home whatever the bound is, where the CPU updates", "[managed]") {
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  const UpdateIn update_in = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse, UpdateIn::kBackward);
  const bool gradients = GENERATE(true, false);
  Parameters how = within(100 * kBytes);
  how.gradients = gradients;
  Rig rig(late_without_stash());
  const at::Tensor weight = make_weight();
  rig.offloader().manage({weight}, how);
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), update_in, update_on);
  for (int step = 0; step < 3; ++step) {
    backward(weight);
    optimizer.step();
    optimizer.zero_grad();
    static_cast<void>(value_of(weight));
    const auto& state = dynamic_cast<const OptimizerState&>(*optimizer.state().begin()->second);
    const bool is_new = step == 0 && update_in != UpdateIn::kStep;
    const bool is_on_device = update_on == UpdateOn::kDevice;
    CHECK((is_new || is_away(state.parts.front().at("exp_avg")) != is_on_device));
  }
}

TEST_CASE("homes of gradients that the CPU has used end with them", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse);
  Rig rig(late_without_stash());
  const at::Tensor weight = make_weight();
  rig.offloader().manage({weight}, within(100 * kBytes));
  AdamW optimizer({weight}, {}, update_in, UpdateOn::kCpu);
  for (int step = 0; step < 10; ++step) {
    backward(weight);
    optimizer.step();
    optimizer.zero_grad();
    static_cast<void>(value_of(weight));
  }
  CHECK(rig.stats().pool.peak_bytes <= 5 * kBytes);  // the weight, two states, and a gradient beside the one before
}

TEST_CASE("homes of gradients end with them, though each outlives the beginning of the next", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor weight = make_weight();
  rig.offloader().manage({weight}, within(100 * kBytes));
  at::Tensor before;
  for (int step = 0; step < 20; ++step) {
    backward(weight);
    before = std::exchange(weight.mutable_grad(), at::Tensor());
  }
  CHECK(rig.stats().pool.peak_bytes <= 5 * kBytes);
}

TEST_CASE("a negated gradient keeps its sign", "[managed]") {
  const bool gradients = GENERATE(true, false);
  Tensors found;
  for (const UpdateOn update_on : {UpdateOn::kDevice, UpdateOn::kCpu}) {
    for (const UpdateIn update_in : {UpdateIn::kStep, UpdateIn::kNextUse, UpdateIn::kBackward}) {
      Rig rig(late_without_stash());
      const at::Tensor weight = make_weight();
      weight.register_hook([](const at::Tensor& gradient) { return at::_neg_view(gradient.neg()); });
      Parameters how = within(0);
      how.gradients = gradients;
      rig.offloader().manage({weight}, how);
      SGD optimizer({weight}, torch::optim::SGDOptions(0.1).momentum(0.9), update_in, update_on);
      for (int step = 0; step < 3; ++step) {
        backward(weight);
        optimizer.step();
        optimizer.zero_grad();
      }
      found.push_back(value_of(weight));
    }
  }
  for (const at::Tensor& each : found) {
    CHECK(at::allclose(each, found.front()));
  }
}

TEST_CASE("a gradient that is the parameter, or a state, is one for updates on the CPU, too", "[managed]") {
  const bool is_state = GENERATE(false, true);
  const bool is_at_home = GENERATE(false, true);
  Tensors found;
  for (const UpdateOn update_on : {UpdateOn::kDevice, UpdateOn::kCpu}) {
    Rig rig(late_without_stash());
    const at::Tensor weight = make_weight();
    if (is_at_home) {
      rig.offloader().manage({weight}, within(0));
    }
    SGD optimizer({weight}, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.5), UpdateIn::kStep, update_on);
    backward(weight);
    optimizer.step();
    const auto& state = dynamic_cast<const OptimizerState&>(*optimizer.state().begin()->second);
    weight.mutable_grad() = is_state ? state.parts.front().at("momentum_buffer") : weight.variable_data();
    optimizer.step();
    found.push_back(value_of(weight));
  }
  CHECK(at::equal(found[0], found[1]));
}

// A weight after some steps, and its states.
std::vector<at::Tensor> updated(std::uint64_t capacity_bytes, const Parameters& how) {
  Setting setting = late_without_stash();
  setting.options.capacity_bytes = capacity_bytes;
  Rig rig(setting);
  const at::Tensor weight = make_weight();
  rig.offloader().manage({weight}, how);
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1).weight_decay(0.1), UpdateIn::kBackward, UpdateOn::kCpu);
  for (int step = 0; step < 3; ++step) {
    backward(weight);
    optimizer.step();
  }
  std::vector<at::Tensor> found{value_of(weight)};
  for (const auto& [name, state] :
       dynamic_cast<const OptimizerState&>(*optimizer.state().begin()->second).parts.front()) {
    found.push_back(value_of(state));
  }
  return found;
}

TEST_CASE("an update on the CPU has the same bits where a gradient or a state has no home", "[managed]") {
  const auto expected = updated(100 * kBytes, within(0));
  Parameters gradients_stay = within(0);
  gradients_stay.gradients = false;
  test::check_equal(expected, updated(100 * kBytes, gradients_stay));
  test::check_equal(expected, updated(3 * kBytes, gradients_stay));  // no room for a copy
  Parameters states_stay = within(0);
  states_stay.states = false;
  test::check_equal(expected, updated(100 * kBytes, states_stay));
}

TEST_CASE("copies of gradients wait for room in host memory", "[managed]") {
  constexpr std::uint64_t kWeights = 4;
  Setting setting = late_without_stash();
  setting.options.capacity_bytes = (3 * kWeights + 1) * kBytes;  // and one copy at a time
  Rig rig(setting);
  std::vector<at::Tensor> weights;
  for (std::uint64_t i = 0; i < kWeights; ++i) {
    weights.push_back(make_weight());
  }
  rig.offloader().manage(weights, within(100 * kBytes));
  AdamW optimizer(weights, {}, UpdateIn::kBackward, UpdateOn::kCpu);
  for (int step = 0; step < 4; ++step) {
    for (const at::Tensor& each : weights) {
      backward(each);
    }
    optimizer.step();
  }
  for (const auto& [key, state] : optimizer.state()) {
    CHECK(is_away(dynamic_cast<const OptimizerState&>(*state).parts.front().at("exp_avg")));
  }
}

using Program = std::function<void(const at::Tensor& weight, at::Tensor& held)>;

// A weight after some steps, in which the program writes to what it holds of the gradient after each.
at::Tensor trained_while_held(UpdateIn update_in, Offloader* offloader, const Program& begin,
                              const std::function<at::Tensor(const at::Tensor&)>& loss) {
  const at::Tensor weight = make_weight();
  if (offloader != nullptr) {
    Parameters how = within(0);
    how.gradients = false;
    offloader->manage({weight}, how);
  }
  at::Tensor held;
  begin(weight, held);
  AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), update_in, UpdateOn::kCpu);
  for (int step = 0; step < 3; ++step) {
    torch::autograd::backward({loss(weight)});
    optimizer.step();
    held.zero_();
    optimizer.zero_grad();
    begin(weight, held);
  }
  leave_gradients_alone(weight, &held);
  return value_of(weight);
}

TEST_CASE("an update that is put off is of the gradient as it was", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kBackward, UpdateIn::kNextUse);
  const auto sine = [](const at::Tensor& weight) { return (weight * 3).sin().sum(); };
  const auto sum = [](const at::Tensor& weight) { return weight.sum(); };  // whose gradient is expanded, and so cloned
  const std::vector<std::pair<std::string, Program>> programs{
      {"holds a view of what comes to the leaf",
       [](const at::Tensor& weight, at::Tensor& held) {
         if (!held.defined()) {
           weight.register_hook([&held](const at::Tensor& gradient) { held = gradient.view({-1}); });
         }
       }},
      {"holds the gradient",
       [](const at::Tensor& weight, at::Tensor& held) {
         if (!held.defined()) {
           after_each_gradient(weight, &held, [&held](const at::Tensor& leaf) { held = leaf.grad(); });
         }
       }},
      {"holds a view of the gradient",
       [](const at::Tensor& weight, at::Tensor& held) {
         if (!held.defined()) {
           after_each_gradient(weight, &held, [&held](const at::Tensor& leaf) { held = leaf.grad().view({-1}); });
         }
       }},
      {"accumulates into a buffer of its own",
       [](const at::Tensor& weight, at::Tensor& held) {
         held = held.defined() ? held : at::zeros({kFloats});
         weight.mutable_grad() = held.variable_data();
       }},
  };
  for (const auto& [name, program] : programs) {
    for (const auto& loss : {std::function<at::Tensor(const at::Tensor&)>(sine), {sum}}) {
      INFO(name);
      const at::Tensor expected = trained_while_held(UpdateIn::kStep, nullptr, program, loss);
      Rig rig(late_without_stash());
      CHECK(at::equal(trained_while_held(update_in, &rig.offloader(), program, loss), expected));
    }
  }
}

TEST_CASE("a copy home that fails before an update on the CPU loses nothing", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor weight = make_weight();
  const at::Tensor other = make_weight();
  rig.offloader().manage({weight, other}, within(kBytes));
  const at::NoGradGuard no_grad;
  weight.mul_(2);
  const at::Tensor expected = value_of(weight);
  rig.tier().fail_copy(1);
  CHECK(use_at_home({weight}) == nullptr);
  CHECK(at::equal(value_of(weight), expected));
  CHECK(at::equal(value_of(other), value_of(make_weight())));
}

TEST_CASE("an update is done on the device where the copy home of its gradient fails", "[managed]") {
  const UpdateIn update_in = GENERATE(UpdateIn::kStep, UpdateIn::kNextUse);
  const bool is_view = GENERATE(false, true);
  const auto train = [update_in, is_view](Rig* rig) {
    const at::Tensor weight = make_weight();
    Parameters how = within(0);
    how.gradients = false;
    if (rig != nullptr) {
      rig->offloader().manage({weight}, how);
    }
    AdamW optimizer({weight}, torch::optim::AdamWOptions(0.1), update_in, UpdateOn::kCpu);
    for (int step = 0; step < 3; ++step) {
      backward(weight);
      if (is_view) {
        const at::Tensor flat = at::cat({at::ones({kFloats}), weight.grad()});
        weight.mutable_grad() = flat.narrow(0, kFloats, kFloats).variable_data();
      }
      if (rig != nullptr && step == 1) {
        rig->tier().fail_copy(1);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    return value_of(weight);
  };
  Rig rig(late_without_stash());
  CHECK(at::equal(train(&rig), train(nullptr)));
}

// What `act` does on a thread of its own, of which the caller sees whether it waits.
class Waiter {
 public:
  explicit Waiter(std::function<void()> act)
      : thread_([this, act = std::move(act)] {
          has_begun_ = true;
          act();
          is_over_ = true;
        }) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Looks after a while: a thread that waits never fails this, and one that does not wait mostly does.
  [[nodiscard]] bool waits() const {
    while (!has_begun_) {
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return !is_over_;
  }
  ~Waiter() { thread_.join(); }

 private:
  std::atomic<bool> has_begun_{false};
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

TEST_CASE("what uses a tensor that another thread uses at home waits", "[managed]") {
  Rig rig(late_without_stash());
  const at::Tensor weight = at::zeros({kFloats});
  rig.offloader().manage({weight}, within(0));
  const at::NoGradGuard no_grad;
  auto home = use_at_home({weight});
  REQUIRE(home != nullptr);
  CHECK_THROWS_WITH(value_of(weight), Catch::Contains("while this thread"));
  at::Tensor seen;
  {
    const Waiter other([&] { seen = value_of(weight); });
    CHECK(other.waits());
    home->front().add_(1);
    home.reset();
  }
  CHECK(at::equal(seen, at::ones({kFloats})));
  home = use_at_home({weight});
  REQUIRE(home != nullptr);
  CHECK_THROWS_WITH(value_of(weight), Catch::Contains("while this thread"));
  home.reset();
  CHECK_THROWS_WITH(weight.const_data_ptr(), Catch::Contains("managed"));  // after the use that got no bytes, too
}

TEST_CASE("no more bytes of copies than are asked for wait for their updates", "[managed]") {
  const std::uint64_t most = GENERATE(kBytes / 2, kBytes, 2 * kBytes);
  Rig rig(late_without_stash());
  const at::Tensor state = at::zeros({kFloats});
  const std::vector<at::Tensor> weights{make_weight(), make_weight()};
  rig.offloader().manage({weights[0], weights[1], state}, within(0));
  const std::shared_ptr<UpdateRule> rule =
      rule_of<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).momentum(0.9), /*step=*/1);
  const at::NoGradGuard no_grad;
  Updates updates(UpdateIn::kNextUse, UpdateOn::kCpu, kElementsAtOnce, most);
  const auto update = [&](const at::Tensor& weight, const at::Tensor& momentum) {
    weight.mutable_grad() = at::ones({kFloats});
    std::vector<Part> parts{{{"momentum_buffer", momentum}}};
    updates.update(weight, parts, rule, Updates::Called::kInStep);
  };
  auto home = use_at_home({state});  // which the first update has to wait for
  update(weights[0], state);
  const at::Tensor other = at::zeros({kFloats});
  rig.offloader().manage({other}, within(0));
  {
    const Waiter second([&] { update(weights[1], other); });
    CHECK(second.waits() == (most < 2 * kBytes));
    home.reset();
  }
  CHECK(at::equal(value_of(weights[0]), value_of(weights[1])));
}

TEST_CASE("homes of copies of gradients end with their updates", "[managed]") {
  constexpr int kWeights = 64;
  constexpr int kCopies = 2;  // that may wait for their updates
  Rig rig(late_without_stash());
  const std::shared_ptr<UpdateRule> rule =
      rule_of<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).momentum(0.9), /*step=*/1);
  const at::NoGradGuard no_grad;
  Tensors weights;
  std::vector<std::vector<Part>> states;
  for (int i = 0; i < kWeights; ++i) {
    weights.push_back(make_weight());
    states.push_back({{{"momentum_buffer", at::zeros({kFloats})}}});
    rig.offloader().manage({weights.back(), states.back().front().at("momentum_buffer")}, within(0));
  }
  Updates updates(UpdateIn::kNextUse, UpdateOn::kCpu, kElementsAtOnce, kCopies * kBytes);
  for (int i = 0; i < kWeights; ++i) {
    weights[i].mutable_grad() = at::ones({kFloats});
    updates.update(weights[i], states[i], rule, Updates::Called::kInStep);
  }
  CHECK(rig.stats().pool.peak_bytes <= (2 * kWeights + kCopies + 1) * kBytes);  // one may be about to end
  CHECK(at::equal(value_of(weights[0]), value_of(weights[kWeights - 1])));
}

constexpr std::int64_t kMany = 1 << 20;

// A weight, and an optimizer that has made one step of the same kind before.
template <typename Options>
struct AfterOneStep {
  AfterOneStep(const Options& options, UpdateOn update_on) {
    at::manual_seed(2);
    weight = at::randn({kMany}).requires_grad_();
    weight.mutable_grad() = gradient();
    OptimizerWith<Options> before({weight}, options);
    before.step();
    start = value_of(weight);
    OptimizerWith<Options> optimizer({weight}, options, UpdateIn::kStep, update_on);
    test::load_archive(test::archive_of(before), optimizer);
    weight.mutable_grad() = gradient();
    optimizer.step();
  }

  // Of very different sizes.
  static at::Tensor gradient() { return at::randn({kMany}) * at::exp(4 * at::randn({kMany})); }

  at::Tensor weight;
  at::Tensor start;
};

// The largest difference of an element between updates on the device and on the CPU, in units in the last place of the
// largest of the element before, the element after, and the learning rate.
template <typename Options>
double units_between(const Options& options) {
  const AfterOneStep<Options> one(options, UpdateOn::kDevice);
  const AfterOneStep<Options> other(options, UpdateOn::kCpu);
  const at::Tensor largest = at::maximum(one.start.abs(), one.weight.detach().abs()).clamp_min(options.lr());
  const at::Tensor unit = at::nextafter(largest, at::full({}, std::numeric_limits<float>::infinity())) - largest;
  const at::Tensor apart = (one.weight.detach().to(at::kDouble) - other.weight.detach().to(at::kDouble)).abs();
  return (apart / unit.to(at::kDouble)).max().template item<double>();
}

TEST_CASE("after one step, weights updated on the CPU differ by few units in the last place") {
  namespace optim = torch::optim;
  constexpr double kMost = 8;
  const double adamw = units_between(optim::AdamWOptions(1e-2).weight_decay(0.1));
  CHECK(adamw > 0);  // or one optimizer would be compared with itself
  CHECK(adamw <= kMost);
  CHECK(units_between(optim::AdamWOptions(1).amsgrad(true)) <= kMost);
  CHECK(units_between(optim::AdamOptions(1e-2).weight_decay(0.1)) <= kMost);
  CHECK(units_between(optim::SGDOptions(1e-2).weight_decay(0.1)) <= kMost);
  CHECK(units_between(optim::SGDOptions(1e-2).momentum(0.9).nesterov(true)) <= kMost);
}

}  // namespace
}  // namespace ebb
