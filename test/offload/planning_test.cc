// Steps that are recorded, planned under a budget, and then follow their plan. The device is simulated: its memory is
// what this binary's allocator of CPU tensors has handed out.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>

#include "streams/simulated_device_allocator.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using Catch::Contains;

constexpr std::uint64_t kMatrix = 64 * 64 * sizeof(float);
constexpr int kLayers = 12;
constexpr int kUntilPlanned = 2;   // steps
constexpr int kUntilSettled = 10;  // after which none is recorded any more

// The device's memory in use. Watches it beside whoever asks its meter.
class Device {
 public:
  [[nodiscard]] DeviceMeter meter() {
    return [this] { return take(); };
  }

  void start_peak() {
    take();
    peak_ = 0;
  }
  [[nodiscard]] std::uint64_t peak() {
    take();
    return peak_;
  }

 private:
  DeviceUse take() {
    auto& allocator = dynamic_cast<SimulatedDeviceAllocator&>(*c10::GetCPUAllocator());
    const auto [now, peak] = allocator.bytes();
    allocator.reset_peak();
    peak_ = std::max(peak_, peak);
    return {now, peak};
  }

  std::uint64_t peak_ = 0;
};

Setting planned(const DeviceBudget& budget, Device* device = nullptr) {
  Setting setting = disk();
  setting.options.policy = nullptr;
  setting.options.stash_bytes.reset();
  setting.options.device_budget = budget;
  setting.options.planned_minimum_bytes = kMatrix;
  if (device != nullptr) {
    setting.options.device_meter = device->meter();
  }
  return setting;
}

// What a chain of matmuls and activations learns: it saves two matrices a layer, one of which can be recomputed.
at::Tensor network(Inputs& in, std::int64_t rows = 64) {
  at::Tensor x = in.activation({rows, 64});
  for (int i = 0; i < kLayers; ++i) {
    x = at::silu(x.matmul(in.leaf({64, 64})));
  }
  return in.loss(x);
}

Tensors train_step(Offloader* offloader, std::int64_t rows = 64) {
  Inputs in;
  const Run run(offloader);
  const auto guard = run.guard();
  network(in, rows).backward();
  return in.gradients();
}

std::uint64_t plain_peak(Device& device) {
  train_step(nullptr);
  device.start_peak();
  train_step(nullptr);
  return device.peak();
}

std::uint64_t moved(const Rig& rig) { return rig.stats().offloaded.tensors + rig.stats().dropped.tensors; }

// How many storages the step moves or drops.
std::uint64_t moved_by_step(Rig& rig, std::int64_t rows = 64) {
  const std::uint64_t before = moved(rig);
  train_step(&rig.offloader(), rows);
  return moved(rig) - before;
}

std::uint64_t least_peak(Device& device) {
  Rig rig(planned(LeastMemory{}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  return rig.offloader().plan_report().value().predicted.peak_bytes;
}

// Between the least and what plain training takes, at this share of the way.
std::uint64_t between(Device& device, double share) {
  const std::uint64_t least = least_peak(device);
  return least + static_cast<std::uint64_t>(share * static_cast<double>(plain_peak(device) - least));
}

TEST_CASE_METHOD(NoLeak, "a step that fits is recorded twice, and then nothing is moved any more") {
  Device device;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &device));
  CHECK(moved_by_step(rig) > kLayers);
  CHECK_FALSE(rig.offloader().plan_report());
  CHECK(moved_by_step(rig) > kLayers);
  CHECK(moved_by_step(rig) == 0);
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->fits);
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "device memory stays within the budget in every step that follows a plan") {
  Device device;
  const std::uint64_t budget = between(device, GENERATE(0.01, 0.3, 0.5, 0.9));
  CAPTURE(budget);
  Rig rig(planned(DeviceBytes{budget}, &device));
  for (int step = 0; step < kUntilSettled + 3; ++step) {
    CAPTURE(step);
    device.start_peak();
    const std::uint64_t moved_now = moved_by_step(rig);
    if (step >= kUntilPlanned) {
      CHECK(device.peak() <= budget);
      CHECK(moved_now > 0);
    }
  }
  const auto report = rig.offloader().plan_report();
  REQUIRE(report);
  CHECK(report->budget_bytes == budget);
  CHECK(report->fits);
  CHECK(report->predicted.peak_bytes <= budget);
}

TEST_CASE_METHOD(NoLeak, "what all kept would take is predicted to the byte") {
  Device device;
  const std::uint64_t plain = plain_peak(device);
  Rig rig(planned(DeviceBytes{kUnlimited}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  const std::uint64_t predicted = rig.offloader().plan_report()->predicted.peak_bytes;
  CHECK(predicted >= plain);
  CHECK(predicted <= plain + kMatrix);  // a storage's last node may still hold it when the next is needed
}

TEST_CASE_METHOD(NoLeak, "the step that checks a plan takes what it has said") {
  Device device;
  Rig rig(planned(DeviceBytes{between(device, 0.5)}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const auto report = rig.offloader().plan_report();
  REQUIRE(report);
  REQUIRE(report->actual);
  CHECK(report->actual->peak_bytes <= report->budget_bytes);
  CHECK(report->actual->peak_bytes + 2 * kMatrix >= report->predicted.peak_bytes);
  CHECK(report->actual->ms > 0);
}

TEST_CASE_METHOD(NoLeak, "a budget that cannot be met is an error that names the least that can be") {
  Device device;
  Rig rig(planned(DeviceBytes{kMatrix}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  CHECK_THROWS_WITH(train_step(&rig.offloader()), Contains("Options::device_budget cannot be met") &&
                                                      Contains("it is 16.0 KiB") && Contains("takes at least"));
  CHECK_THROWS_WITH(train_step(&rig.offloader()), Contains("cannot be met"));
}

TEST_CASE_METHOD(NoLeak, "a budget that is a wish is come near to") {
  Device device;
  const Tensors expected = train_step(nullptr);  // which takes memory, too
  const std::uint64_t plain = plain_peak(device);
  Setting setting = planned(DeviceBytes{kMatrix}, &device);
  setting.options.device_budget_is_a_wish = true;
  Rig rig(setting);
  for (int step = 0; step < kUntilSettled; ++step) {
    device.start_peak();
    check_same({expected, ""}, {train_step(&rig.offloader()), ""});
  }
  CHECK(device.peak() < plain * 9 / 10);
  REQUIRE(rig.offloader().plan_report());
  CHECK_FALSE(rig.offloader().plan_report()->fits);
  CHECK(device.peak() <= rig.offloader().plan_report()->predicted.peak_bytes);
}

TEST_CASE_METHOD(NoLeak, "every goal gives the gradients of plain autograd in every step") {
  Device device;
  const Tensors expected = train_step(nullptr);
  const std::uint64_t plain = plain_peak(device);
  const DeviceBudget budget =
      GENERATE_COPY(DeviceBudget(DeviceBytes{plain * 3 / 4}), DeviceBudget(DeviceBytes{plain}),
                    DeviceBudget(Slowdown{0}), DeviceBudget(Slowdown{0.1}), DeviceBudget(LeastMemory{}));
  const bool metered = GENERATE(false, true);
  for (const auto schedule :
       {std::optional<Schedule>(), std::optional(Schedule::kLate), std::optional(Schedule::kRandom)}) {
    Setting setting = planned(budget, metered ? &device : nullptr);
    setting.options.device_budget_is_a_wish = true;
    setting.schedule = schedule;
    Rig rig(setting);
    for (int step = 0; step < kUntilSettled; ++step) {
      check_same({expected, ""}, {train_step(&rig.offloader()), ""});
    }
  }
}

TEST_CASE_METHOD(NoLeak, "less memory is planned for where more time is allowed, down to the least") {
  Device device;
  const auto peak_of = [&](const DeviceBudget& budget) {
    Rig rig(planned(budget, &device));
    for (int step = 0; step < kUntilPlanned; ++step) {
      train_step(&rig.offloader());
    }
    return rig.offloader().plan_report().value().predicted.peak_bytes;
  };
  const std::uint64_t least = least_peak(device);
  const std::uint64_t most = peak_of(DeviceBytes{kUnlimited});
  CHECK(least <= peak_of(Slowdown{100}));
  CHECK(peak_of(Slowdown{100}) < most);
  CHECK(peak_of(Slowdown{0}) <= most);
  CHECK(least < most * 3 / 4);
}

TEST_CASE_METHOD(NoLeak, "another kind of step is recorded anew, and both plans are kept") {
  Device device;
  Rig rig(planned(DeviceBytes{kUnlimited}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  CHECK(moved_by_step(rig, 128) > kLayers);  // it strays
  for (int step = 0; step < kUntilPlanned; ++step) {
    CHECK(moved_by_step(rig, 128) > kLayers);
  }
  CHECK(moved_by_step(rig, 128) == 0);
  CHECK(moved_by_step(rig) == 0);
  CHECK(moved_by_step(rig, 128) == 0);
}

TEST_CASE_METHOD(NoLeak, "evaluation and other graphs between do not disturb the recording") {
  Device device;
  Rig rig(planned(DeviceBytes{kUnlimited}, &device));
  const auto other_backward = [] {
    Inputs in;
    in.activation({4}).sin().sum().backward();
  };
  for (int step = 0; step < kUntilPlanned; ++step) {
    {
      const OffloadGuard guard(rig.offloader());
      Inputs in;
      network(in);
    }
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    const at::Tensor loss = network(in);
    other_backward();
    loss.backward();
    other_backward();
  }
  CHECK(moved_by_step(rig) == 0);
  CHECK(rig.offloader().plan_report());
}

TEST_CASE_METHOD(NoLeak, "an older graph that is kept alive does not stand in the way of plans, nor of their budget") {
  Device device;
  const std::uint64_t budget = between(device, 0.5) + 40 * kMatrix;  // for the other graph
  Rig rig(planned(DeviceBytes{budget}, &device));
  Inputs old;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = network(old);
    loss.backward({}, /*retain_graph=*/true);
  }
  for (int step = 0; step < kUntilSettled; ++step) {
    device.start_peak();
    train_step(&rig.offloader());
    if (step > kUntilPlanned) {
      CHECK(device.peak() <= budget);
    }
  }
  CHECK(rig.offloader().plan_report());
}

// Something else has `x` when backward begins, and lets go of it before the head's backward takes the most memory.
TEST_CASE_METHOD(NoLeak,
                 "what ebb has away is not kept for backward where that has no room, though it is still there") {
  Device device;
  Rig rig(planned(LeastMemory{}, &device));
  for (int step = 0; step < kUntilSettled + 2; ++step) {
    Inputs in;
    at::Tensor loss;
    device.start_peak();
    {
      const OffloadGuard guard(rig.offloader());
      const at::Tensor x = in.activation({64, 64});
      const at::Tensor body = x.sin();
      const NoOpGuard head_guard;
      const at::Tensor large = body.repeat({1, 32}).pow(3).sum();
      const at::Tensor last = x.pow(2).sum();  // the first to run in backward
      loss = large + last;
    }
    loss.backward();
    if (step >= kUntilPlanned) {
      CHECK(device.peak() <= rig.offloader().plan_report().value().predicted.peak_bytes);
    }
  }
}

TEST_CASE_METHOD(NoLeak, "a step that strays from its plan after another graph's backward has begun on it is right") {
  Device device;
  Rig rig(planned(LeastMemory{}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const auto straying = [](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    const auto guard = run.guard();
    at::Tensor x = in.activation({64, 64});
    for (int i = 0; i < 3 * kLayers; ++i) {
      x = at::silu(x.matmul(in.leaf({64, 64})));
      if (i == kLayers / 2) {
        Inputs other;
        other.activation({4}).sin().sum().backward();
      }
    }
    in.loss(x).backward();
    return in.gradients();
  };
  check_same({straying(nullptr), ""}, {straying(&rig.offloader()), ""});
}

TEST_CASE_METHOD(NoLeak, "a backward that fails is not learned from") {
  Device device;
  Rig rig(planned(DeviceBytes{kUnlimited}, &device));
  train_step(&rig.offloader());
  {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    at::Tensor x = in.activation({64, 64});
    at::Tensor middle;
    for (int i = 0; i < kLayers; ++i) {
      x = at::silu(x.matmul(in.leaf({64, 64})));
      if (i == kLayers / 2) {
        x.register_hook([](const at::Tensor& /*gradient*/) -> at::Tensor { throw std::runtime_error("a hook's"); });
      }
    }
    CHECK_THROWS_WITH(in.loss(x).backward(), Contains("a hook's"));
  }
  forget_failed_backward();
  CHECK_FALSE(rig.offloader().plan_report());
  train_step(&rig.offloader());
  CHECK(rig.offloader().plan_report());
}

TEST_CASE_METHOD(NoLeak, "what something else keeps on the device is not moved") {
  Device device;
  Setting setting = planned(LeastMemory{}, &device);
  Rig rig(setting);
  const at::Tensor kept = at::randn({64, 64});
  const auto step = [&] {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    at::Tensor x = in.activation({64, 64});
    for (int i = 0; i < 3; ++i) {
      x = (x * kept).sin();
    }
    x.sum().backward();
  };
  for (int i = 0; i < kUntilPlanned; ++i) {
    step();
  }
  const std::uint64_t fetched = rig.stats().fetched.bytes;
  const std::uint64_t offloaded = rig.stats().offloaded.bytes;
  step();
  CHECK(rig.stats().offloaded.bytes - offloaded <= 6 * kMatrix);
  CHECK(rig.stats().fetched.bytes - fetched <= 6 * kMatrix);
}

TEST_CASE_METHOD(NoLeak, "a plan counts what host memory there is") {
  Device device;
  Setting setting = planned(DeviceBytes{between(device, 0.3)}, &device);
  setting.options.capacity_bytes = 8 * kMatrix;
  setting.options.device_budget_is_a_wish = true;
  Rig rig(setting);
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes <= 8 * kMatrix);
  const std::uint64_t refused = rig.stats().kept_for(Kept::kNoRoom).tensors;
  train_step(&rig.offloader());
  CHECK(rig.stats().kept_for(Kept::kNoRoom).tensors == refused);
}

TEST_CASE_METHOD(NoLeak, "a plan is explained by operation") {
  Device device;
  Rig rig(planned(DeviceBytes{between(device, 0.5)}, &device));
  CHECK_THAT(rig.offloader().explain(), Contains("no plan yet"));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const std::string text = rig.offloader().explain();
  CHECK_THAT(text, Contains("SiluBackward0") && Contains("MmBackward0") && Contains("at most"));
  CHECK_THAT(text, Contains("offload") || Contains("recompute"));
  CHECK_THAT(text, Contains("peak: predicted") && !Contains("not known"));
}

TEST_CASE_METHOD(NoLeak, "without a budget there is no plan") {
  Rig rig(late());
  train_step(&rig.offloader());
  CHECK_FALSE(rig.offloader().plan_report());
  CHECK_THAT(rig.offloader().explain(), Contains("Options::device_budget is not set"));
  Options off;
  off.enabled = false;
  const Offloader none(off);
  CHECK_THAT(none.explain(), Contains("switched off"));
  CHECK_FALSE(none.plan_report());
}

TEST_CASE("options that a plan takes the place of, and budgets that are none, are refused") {
  const auto refusal = [](const DeviceBudget& budget, const std::function<void(Options&)>& change) {
    Options options;
    options.device = c10::Device(c10::kCPU);
    options.device_budget = budget;
    change(options);
    try {
      const Offloader offloader(options);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto as_it_is = [](Options& /*options*/) {};
  CHECK(refusal(DeviceBytes{1}, as_it_is) == "accepted");
  CHECK_THAT(refusal(DeviceBytes{0}, as_it_is), Contains("device_budget is 0 bytes"));
  CHECK_THAT(refusal(DeviceBytes{std::uint64_t(-2)}, as_it_is), Contains("device_budget is -2 bytes"));
  CHECK_THAT(refusal(ShareOfFree{0}, as_it_is), Contains("a share of 0"));
  CHECK_THAT(refusal(ShareOfFree{1.5}, as_it_is), Contains("a share of 1.5"));
  CHECK_THAT(refusal(ShareOfFree{0.5}, as_it_is), Contains("not known of the CPU"));
  CHECK_THAT(refusal(Slowdown{-0.1}, as_it_is), Contains("a slowdown of -0.1"));
  CHECK_THAT(refusal(Slowdown{std::nan("")}, as_it_is), Contains("a slowdown of nan"));
  CHECK_THAT(refusal(DeviceBytes{1}, [](Options& o) { o.policy = disk().options.policy; }),
             Contains("Options::policy are both set"));
  CHECK_THAT(refusal(DeviceBytes{1}, [](Options& o) { o.stash_bytes = 1; }), Contains("stash_bytes are both"));
  CHECK_THAT(refusal(DeviceBytes{1}, [](Options& o) { o.window_bytes = 1; }), Contains("window_bytes are both"));
  CHECK_THAT(refusal(DeviceBytes{1}, [](Options& o) { o.planned_minimum_bytes = 0; }),
             Contains("planned_minimum_bytes is 0"));
}

}  // namespace
}  // namespace ebb
