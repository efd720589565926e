// Budgets whose plans decide about managed parameters, gradients and states together with what autograd saves. The
// device is simulated, as in planning_test.cc.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/optimizer.h"
#include "offload/parameters.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using test::check_equal;

Parameters as_planned() {
  Parameters how;
  how.minimum_bytes = 0;
  return how;
}

Tensors with(Tensors tensors, const Tensors& more) {
  tensors.insert(tensors.end(), more.begin(), more.end());
  return tensors;
}

// A chain of matmuls and activations, and an optimizer.
class Model {
 public:
  explicit Model(Offloader* offloader, const Parameters& how = as_planned())
      : offloader_(offloader), weights_(make_weights(offloader, how)), optimizer_(weights_, {1e-3}, UpdateIn::kStep) {}

  // Forward and backward. Returns the loss.
  at::Tensor pass(
      bool fails = false, std::int64_t rows = 64, const std::function<void()>& before_backward = [] {}) {
    at::Tensor loss;
    {
      const auto guard = Run(offloader_).guard();
      at::Tensor x = input(rows);
      for (const at::Tensor& weight : weights_) {
        x = at::silu(x.matmul(weight));
        if (fails && weight.is_same(weights_[kLayers / 2])) {
          x.register_hook([](const at::Tensor& /*gradient*/) { throw std::runtime_error("on purpose"); });
        }
      }
      loss = x.square().mean();
    }
    before_backward();
    torch::autograd::backward({loss});
    return loss.detach();
  }

  void update() {
    optimizer_.step();
    optimizer_.zero_grad();
  }

  // Returns the loss.
  at::Tensor step(
      std::int64_t rows = 64, const std::function<void()>& before_backward = [] {}) {
    const at::Tensor loss = pass(/*fails=*/false, rows, before_backward);
    update();
    return loss;
  }

  [[nodiscard]] at::Tensor evaluate() const {
    const at::NoGradGuard no_grad;
    const auto guard = Run(offloader_).guard();
    at::Tensor x = input(8);
    for (const at::Tensor& weight : weights_) {
      x = at::silu(x.matmul(weight));
    }
    return x;
  }

  // Copies.
  [[nodiscard]] Tensors weights() const {
    Tensors copies;
    for (const at::Tensor& weight : weights_) {
      copies.push_back(weight.detach().clone());
    }
    return copies;
  }

  // Losses of some steps, then the weights.
  Tensors train(int steps) {
    Tensors seen;
    for (int i = 0; i < steps; ++i) {
      seen.push_back(step());
    }
    return with(std::move(seen), weights());
  }

 private:
  static at::Tensor input(std::int64_t rows) { return at::arange(rows * 64, at::kFloat).view({rows, 64}).sin(); }

  static Tensors make_weights(Offloader* offloader, const Parameters& how) {
    at::manual_seed(1);
    Tensors weights;
    for (int i = 0; i < kLayers; ++i) {
      weights.push_back((at::randn({64, 64}) * 0.2).requires_grad_());
      if (offloader != nullptr) {
        offloader->manage({weights.back()}, how);
      }
    }
    return weights;
  }

  Offloader* const offloader_;
  Tensors weights_;
  AdamW optimizer_;
};

std::uint64_t resident_peak(MeteredDevice& device) {
  Model model(nullptr);
  static_cast<void>(model.step());
  device.start_peak();
  static_cast<void>(model.step());
  return device.peak();
}

TEST_CASE_METHOD(NoLeak, "a plan's bound for managed storages keeps the device within the budget, with plain bits") {
  MeteredDevice device;
  const std::uint64_t all = resident_peak(device);
  const Tensors expected = Model(nullptr).train(kUntilSettled);
  const std::uint64_t budget = GENERATE_COPY(all / 2, 2 * all / 3, 3 * all / 4, 2 * all);
  CAPTURE(all, budget);
  const std::uint64_t before = (device.start_peak(), device.peak());
  Rig rig(planned(DeviceBytes{budget}, &device));
  {
    Model model(&rig.offloader());
    CHECK(rig.stats().managed_on_device.capacity_bytes == budget / 4);
    check_equal(expected, model.train(kUntilSettled));
    const auto report = rig.offloader().plan_report();
    REQUIRE(report);
    REQUIRE(report->managed);
    CHECK(report->fits);
    CHECK(rig.stats().managed_on_device.capacity_bytes == report->managed->device_bytes);
    CHECK(rig.offloader().explain().find("managed: at most ") != std::string::npos);
    device.start_peak();
    static_cast<void>(model.step());
    CHECK(device.peak() <= budget + before);
  }
}

TEST_CASE_METHOD(NoLeak, "with room for all a plan leaves all managed storages on the device") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{4 * resident_peak(device)}, &device));
  Model model(&rig.offloader());
  static_cast<void>(model.train(kUntilSettled));
  rig.offloader().reset_stats();
  static_cast<void>(model.step());
  const Stats stats = rig.stats();
  CHECK(stats.managed_prefetched.tensors == 0);
  CHECK(stats.managed_fetched_late.tensors == 0);
  CHECK(stats.offloaded.tensors == 0);
}

TEST_CASE_METHOD(NoLeak, "the copies of managed storages are predicted") {
  MeteredDevice device;
  const std::uint64_t all = resident_peak(device);
  Rig rig(planned(DeviceBytes{all / 2}, &device));
  Model model(&rig.offloader());
  static_cast<void>(model.train(kUntilSettled));
  rig.offloader().reset_stats();
  constexpr std::uint64_t kSteps = 4;
  for (std::uint64_t i = 0; i < kSteps; ++i) {
    static_cast<void>(model.step());
  }
  const Stats stats = rig.stats();
  const ManagedShare share = rig.offloader().plan_report().value().managed.value();
  const std::uint64_t predicted = share.traffic.in_bytes();
  const std::uint64_t copied = (stats.managed_prefetched.bytes + stats.managed_fetched_late.bytes) / kSteps;
  CAPTURE(predicted, copied);
  REQUIRE(predicted > 0);
  CHECK(copied <= predicted + predicted / 4);
  CHECK(copied + predicted / 4 >= predicted);
}

TEST_CASE_METHOD(NoLeak, "a step of another kind gets the first bound again, until there is a plan for it") {
  MeteredDevice device;
  const std::uint64_t budget = resident_peak(device);
  Rig rig(planned(DeviceBytes{budget}, &device));
  Model model(&rig.offloader());
  static_cast<void>(model.train(kUntilSettled));
  REQUIRE(rig.stats().managed_on_device.capacity_bytes != budget / 4);
  static_cast<void>(model.step(/*rows=*/128));
  CHECK(rig.stats().managed_on_device.capacity_bytes == budget / 4);
  CHECK(rig.stats().managed_on_device.now_bytes <= budget / 4);
  static_cast<void>(model.train(kUntilSettled));  // the first of them are recorded, to find the other kind again
  CHECK(rig.stats().managed_on_device.capacity_bytes != budget / 4);
}

TEST_CASE_METHOD(NoLeak, "a step that finds the device full before there is a plan has the first bound halved") {
  MeteredDevice device;
  const std::uint64_t budget = resident_peak(device);
  Rig rig(planned(DeviceBytes{budget}, &device));
  Model model(&rig.offloader());
  for (const std::uint64_t part : {4, 8, 16}) {
    CHECK(rig.stats().managed_on_device.capacity_bytes == budget / part);
    static_cast<void>(model.step(64, [&] { rig.offloader().evict(1); }));
    CHECK_FALSE(rig.offloader().plan_report());
  }
  CHECK(rig.stats().managed_on_device.capacity_bytes == budget / 32);
  const at::Tensor expected = Model(nullptr).train(3 + kUntilSettled).back();
  static_cast<void>(model.train(kUntilSettled - 1));
  check_equal({expected}, {model.train(1).back()});
  CHECK(rig.offloader().plan_report().value().managed);
}

TEST_CASE_METHOD(NoLeak, "a plan keeps to the host memory that managed tensors leave") {
  constexpr std::uint64_t kCapacity = 16 * kMatrix;
  MeteredDevice device;
  Setting setting = planned(DeviceBytes{between(device, 0.5)}, &device);
  setting.options.device_budget_is_a_wish = true;
  setting.options.capacity_bytes = kCapacity;
  Rig rig(setting);
  const auto settle = [&] {
    for (int step = 0; step < kUntilSettled; ++step) {
      train_step(&rig.offloader());
    }
    return rig.offloader().plan_report().value().predicted.offloaded_bytes;
  };
  const std::uint64_t before = settle();
  REQUIRE(before > 2 * kMatrix);
  const std::uint64_t left = before - 2 * kMatrix;
  const at::Tensor weight = at::ones({static_cast<std::int64_t>((kCapacity - left) / sizeof(float))});
  rig.offloader().manage({weight}, test::within(0));
  const Tensors seen = train_step(&rig.offloader());
  const std::uint64_t refused = rig.stats().kept_for(KeptReason::kNoRoom).tensors;
  REQUIRE(refused > 0);
  CHECK(settle() <= left);
  CHECK(rig.stats().kept_for(KeptReason::kNoRoom).tensors == refused);
  check_equal(seen, train_step(&rig.offloader()));
}

TEST_CASE_METHOD(NoLeak, "gradients that accumulate over passes are planned, with plain bits") {
  MeteredDevice device;
  const std::uint64_t budget = 2 * resident_peak(device) / 3;
  const auto train = [](Model&& model) {
    constexpr int kPasses = 3;
    Tensors seen;
    for (int step = 0; step < kUntilSettled; ++step) {
      for (int pass = 0; pass < kPasses; ++pass) {
        seen.push_back(model.pass());
      }
      model.update();
    }
    return with(std::move(seen), model.weights());
  };
  const Tensors expected = train(Model(nullptr));
  Rig rig(planned(DeviceBytes{budget}, &device));
  check_equal(expected, train(Model(&rig.offloader())));
  CHECK(rig.offloader().plan_report().value().managed);
}

TEST_CASE_METHOD(NoLeak, "where states alone are managed, a plan decides about them, with plain bits") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{9 * resident_peak(device) / 10}, &device));
  Parameters states_alone = as_planned();
  states_alone.weights = false;
  states_alone.gradients = false;
  const Tensors expected = Model(nullptr).train(kUntilSettled);
  Model model(&rig.offloader(), states_alone);
  check_equal(expected, model.train(kUntilSettled));
  CHECK(rig.offloader().plan_report().value().managed);
  CHECK(rig.stats().managed.tensors == 2 * kLayers);
}

TEST_CASE_METHOD(NoLeak, "a backward pass that fails is not planned from, and what follows has plain bits") {
  MeteredDevice device;
  const std::uint64_t budget = 2 * resident_peak(device) / 3;
  const auto train = [](Model&& model) {
    Tensors seen;
    for (int step = 0; step < kUntilSettled; ++step) {
      if (step % 3 != 2) {
        CHECK_THROWS_WITH(model.pass(/*fails=*/true), Catch::Contains("on purpose"));
      }
      seen.push_back(model.step());
    }
    return with(std::move(seen), model.weights());
  };
  const Tensors expected = train(Model(nullptr));
  Rig rig(planned(DeviceBytes{budget}, &device));
  {
    Model fails(&rig.offloader());
    for (int step = 0; step < kUntilSettled; ++step) {
      CHECK_THROWS_WITH(fails.pass(/*fails=*/true), Catch::Contains("on purpose"));
    }
    CHECK_FALSE(rig.offloader().plan_report());
  }
  check_equal(expected, train(Model(&rig.offloader())));
  CHECK(rig.offloader().plan_report());
}

TEST_CASE_METHOD(NoLeak, "a model that ends, and another after it, are planned each") {
  MeteredDevice device;
  const std::uint64_t budget = 2 * resident_peak(device) / 3;
  const Tensors expected = Model(nullptr).train(kUntilSettled);
  Rig rig(planned(DeviceBytes{budget}, &device));
  for (int i = 0; i < 2; ++i) {
    Model model(&rig.offloader());
    CHECK(rig.stats().managed_on_device.capacity_bytes == budget / 4);
    check_equal(expected, model.train(kUntilSettled));
    CHECK(rig.stats().managed_on_device.capacity_bytes ==
          rig.offloader().plan_report().value().managed.value().device_bytes);
  }
}

TEST_CASE_METHOD(NoLeak, "a bound that the program sets stays beside a budget") {
  MeteredDevice device;
  const std::uint64_t bound = 5 * kMatrix;
  Rig rig(planned(DeviceBytes{resident_peak(device)}, &device));
  Model model(&rig.offloader(), test::within(bound));
  check_equal(Model(nullptr).train(kUntilSettled), model.train(kUntilSettled));
  CHECK(rig.stats().managed_on_device.capacity_bytes == bound);
  CHECK_FALSE(rig.offloader().plan_report().value().managed);
}

TEST_CASE_METHOD(NoLeak, "with evaluation between training steps there is a plan, and plain bits") {
  MeteredDevice device;
  const std::uint64_t all = resident_peak(device);
  const auto train = [](Model&& model) {
    Tensors seen;
    for (int i = 0; i < kUntilSettled; ++i) {
      seen.push_back(model.step());
      seen.push_back(model.evaluate());
    }
    return seen;
  };
  const Tensors expected = train(Model(nullptr));
  Rig rig(planned(DeviceBytes{all / 2}, &device));
  check_equal(expected, train(Model(&rig.offloader())));
  CHECK(rig.offloader().plan_report().value().managed);
}

TEST_CASE_METHOD(NoLeak, "without a bound, and without a budget that has bytes, nothing is managed") {
  for (const DeviceBudget& budget : {DeviceBudget(Slowdown{0.1}), DeviceBudget(LeastMemory{})}) {
    Rig rig(planned(budget));
    const at::Tensor weight = at::ones({64, 64}, at::requires_grad());
    CHECK_THROWS_AS(rig.offloader().manage({weight}, as_planned()), std::invalid_argument);
    rig.offloader().manage({weight}, test::within(0));  // nothing is lost
  }
}

}  // namespace
}  // namespace ebb
