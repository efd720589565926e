// Steps that are recorded, planned under a budget, and then follow their plan. The device is simulated: its memory is
// what this binary's allocator of CPU tensors has handed out.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <catch2/catch.hpp>

#include "offload/recompute/operation_log.h"
#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using Catch::Contains;

TEST_CASE_METHOD(NoLeak, "a step that fits is recorded twice, and then nothing is moved any more") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &device));
  CHECK(moved_by_step(rig) > kLayers);
  CHECK_FALSE(rig.offloader().plan_report());
  CHECK(moved_by_step(rig) > kLayers);
  CHECK(moved_by_step(rig) == 0);
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->fits);
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes == 0);
}

// Recipes begin from y, and autograd saves it later.
at::Tensor gated_network(Inputs& in) {
  at::Tensor x = in.activation({64, 64});
  for (int i = 0; i < kLayers; ++i) {
    const at::Tensor y = x.matmul(in.leaf({64, 64})) + x;
    x = y * y.sigmoid();
  }
  return in.loss(x);
}

// Of a step: its gradients, and whether its operations were logged when it began, in its middle, and when it ended.
struct Watched {
  Tensors gradients;
  std::array<bool, 3> logged{};
};

Watched watched_step(Offloader* offloader, const std::function<at::Tensor(Inputs&)>& forward) {
  Watched found;
  Inputs in;
  const Run run(offloader);
  const auto guard = run.guard();
  const auto look = [&](std::size_t i) { found.logged.at(i) = OperationLog::here() != nullptr; };
  look(0);
  const at::Tensor loss = forward(in);
  look(1);
  loss.backward();
  look(2);
  found.gradients = in.gradients();
  return found;
}

TEST_CASE_METHOD(NoLeak, "once a plan keeps everything, a step is logged up to its first save") {
  const auto forward =
      GENERATE(std::function<at::Tensor(Inputs&)>(gated_network), [](Inputs& in) { return network(in); });
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &device));
  const Watched plain = watched_step(nullptr, forward);
  for (int step = 0; step < kUntilSettled; ++step) {
    watched_step(&rig.offloader(), forward);
  }
  const std::uint64_t before = moved(rig);
  for (int step = 0; step < 3; ++step) {
    const Watched found = watched_step(&rig.offloader(), forward);
    CHECK(found.logged == std::array{true, false, true});
    check_same({plain.gradients, ""}, {found.gradients, ""});
  }
  CHECK(moved(rig) == before);
}

TEST_CASE_METHOD(NoLeak, "a plan that moves something is followed with the operations logged") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{between(device, 0.8)}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const Watched found = watched_step(&rig.offloader(), [](Inputs& in) { return network(in); });
  CHECK(found.logged == std::array{true, true, true});
}

TEST_CASE_METHOD(NoLeak, "device memory stays within the budget in every step that follows a plan") {
  MeteredDevice device;
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

// A recorded step drops all that it may, and recipes that would run too deep in it need not in a plan.
TEST_CASE_METHOD(NoLeak, "a plan for a sum over many layers, each made from the one before, is followed") {
  constexpr int kManyLayers = 2 * kMaxRecipeDepth;
  const auto step_of = [](Rig& rig) {
    Inputs in;
    at::Tensor loss;
    {
      const Run run(&rig.offloader());
      const auto guard = run.guard();
      Tensors held;  // what nobody saves, and a sum may begin from
      at::Tensor x = in.activation({64, 64});
      for (int i = 0; i < kManyLayers; ++i) {
        held.push_back(at::silu(x).matmul(in.leaf({64, 64})));
        x = x + held.back();
      }
      loss = in.loss(x);
    }
    loss.backward();
  };
  Rig rig(planned(GENERATE(DeviceBudget(DeviceBytes{16 * kMatrix}), DeviceBudget(LeastMemory{}))));
  for (int step = 0; step < kUntilSettled; ++step) {
    step_of(rig);
  }
  const auto report = rig.offloader().plan_report();
  REQUIRE(report);
  CHECK(report->actual);
}

TEST_CASE_METHOD(NoLeak, "what all kept would take is predicted to the byte") {
  MeteredDevice device;
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
  MeteredDevice device;
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

TEST_CASE_METHOD(NoLeak, "without a meter the step that checks a plan has the peak of saved tensors") {
  constexpr std::uint64_t kBudget = 6 * kMatrix;
  Rig rig(planned(DeviceBytes{kBudget}));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  rig.offloader().reset_stats();
  for (int step = kUntilPlanned; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const auto report = rig.offloader().plan_report();
  REQUIRE(report);
  REQUIRE(report->actual);
  CHECK_FALSE(report->metered);
  CHECK(report->predicted.peak_bytes <= kBudget);
  CHECK(report->actual->peak_bytes + kMatrix >= report->predicted.peak_bytes);
  CHECK(report->actual->peak_bytes <= kBudget);
  CHECK(rig.stats().saved_on_device.peak_bytes <= kBudget);
  CHECK(report->actual->peak_bytes <= rig.stats().saved_on_device.peak_bytes);
}

TEST_CASE_METHOD(NoLeak, "with a plan copies in start as backward lets go of what has stayed") {
  MeteredDevice device;
  std::uint64_t ahead = 0;  // of what the first operation saved, when backward is about to ask for it
  const auto step = [&](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    const auto guard = run.guard();
    at::Tensor x = in.activation({4 * 64, 64}).neg().sigmoid().narrow(0, 0, 64);
    x.register_hook([&](const at::Tensor& /*gradient*/) {
      ahead = offloader == nullptr ? 0 : offloader->stats().window.now_bytes;
    });
    const auto compute = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    for (int i = 0; i < 2 * kLayers; ++i) {
      x = x.neg().sigmoid();  // saves its result, which nothing can make again: neg saves nothing
      x.register_hook([&](const at::Tensor& /*gradient*/) { compute(); });
      compute();  // which the copies hide behind
    }
    at::Tensor loss;
    {
      const auto head = run.no_op();
      loss = in.loss(x);
    }
    // Backward begins with the step's peak: no copy has room there.
    x.register_hook([](const at::Tensor& /*gradient*/) { at::empty({64 * 64, 64}); });
    loss.backward();
  };
  Rig unlimited(planned(DeviceBytes{kUnlimited}, &device));
  for (int i = 0; i < kUntilPlanned; ++i) {
    step(&unlimited.offloader());
  }
  const std::uint64_t all_kept = unlimited.offloader().plan_report().value().predicted.peak_bytes;
  const std::uint64_t away = GENERATE(4, 26) * kMatrix;  // what is needed last; 26: what stays takes less than it does
  CAPTURE(away / kMatrix);
  Rig rig(planned(DeviceBytes{all_kept - away}, &device));
  for (int i = 0; i < kUntilSettled; ++i) {
    step(&rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  REQUIRE(rig.offloader().plan_report()->predicted.offloaded_bytes == away);
  CHECK(ahead == 4 * kMatrix);
}

TEST_CASE_METHOD(NoLeak, "with a plan copies in start beside what a recipe has made") {
  constexpr std::int64_t kLarge = 16;  // matrices
  MeteredDevice device;
  std::uint64_t ahead = 0;  // of what the first operation saved, when backward is about to ask for it
  const auto step = [&](Offloader& offloader) {
    Inputs in;
    const Run run(&offloader);
    const auto guard = run.guard();
    const at::Tensor leaf = in.leaf({kLarge * 64, 64});
    const at::Tensor factor = in.leaf({kLarge * 64, 64});
    at::Tensor x = in.activation({kLarge * 64, 64}).neg().sigmoid();  // nothing can make its result again
    x.register_hook([&](const at::Tensor& /*gradient*/) { ahead = offloader.stats().window.now_bytes; });
    x = x + at::silu(leaf) * factor;  // the recipe's input stays
    at::Tensor loss;
    {
      const auto head = run.no_op();
      loss = in.loss(x);
    }
    // Backward begins with the step's peak: no copy has room there.
    x.register_hook([](const at::Tensor& /*gradient*/) { at::empty({92 * 64, 64}); });
    loss.backward();
  };
  Rig unlimited(planned(DeviceBytes{kUnlimited}, &device));
  for (int i = 0; i < kUntilPlanned; ++i) {
    step(unlimited.offloader());
  }
  const std::uint64_t all_kept = unlimited.offloader().plan_report().value().predicted.peak_bytes;
  Rig rig(planned(DeviceBytes{all_kept - 2 * kLarge * kMatrix}, &device));
  for (int i = 0; i < kUntilSettled; ++i) {
    step(rig.offloader());
  }
  const Prediction predicted = rig.offloader().plan_report().value().predicted;
  REQUIRE(predicted.offloaded_bytes == kLarge * kMatrix);
  REQUIRE(predicted.recomputed_bytes == kLarge * kMatrix);
  CHECK(ahead == kLarge * kMatrix);
}

TEST_CASE_METHOD(NoLeak, "a budget that cannot be met is an error that names the least that can be") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{kMatrix}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    train_step(&rig.offloader());
  }
  CHECK_THROWS_WITH(train_step(&rig.offloader()), Contains("Options::device_budget cannot be met") &&
                                                      Contains("it is 16.0 KiB") && Contains("takes at least"));
  CHECK_THROWS_WITH(train_step(&rig.offloader()), Contains("cannot be met"));
}

TEST_CASE_METHOD(NoLeak, "a budget that is a wish is come near to") {
  MeteredDevice device;
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
  MeteredDevice device;
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

// Residual blocks of convolution, batch norm and relu, as in ResNet, with dropout before the last layer.
Tensors convolutions(Offloader* offloader) {
  Inputs in;
  at::manual_seed(3);
  const Run run(offloader);
  const auto guard = run.guard();
  const auto normed = [&](const at::Tensor& x, const at::Tensor& filter) {
    return at::batch_norm(at::conv2d(x, filter, {}, 1, 1), in.leaf({8}), in.leaf({8}), {}, {}, /*training=*/true,
                          /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/false);
  };
  at::Tensor x = in.activation({4, 8, 16, 16});
  for (int i = 0; i < 4; ++i) {
    const at::Tensor inside = at::relu(normed(x, in.leaf({8, 8, 3, 3})));
    x = at::relu(normed(inside, in.leaf({8, 8, 3, 3})) + x);
  }
  in.loss(at::dropout(x, 0.3, /*train=*/true)).backward();
  return in.gradients();
}

TEST_CASE_METHOD(NoLeak, "a convolutional network with dropout has plain autograd's gradients under every goal") {
  MeteredDevice device;
  const Tensors expected = convolutions(nullptr);
  device.start_peak();
  convolutions(nullptr);
  const std::uint64_t plain = device.peak();
  const DeviceBudget budget = GENERATE_COPY(DeviceBudget(DeviceBytes{plain * 3 / 4}), DeviceBudget(DeviceBytes{plain}),
                                            DeviceBudget(Slowdown{0.1}), DeviceBudget(LeastMemory{}));
  Setting setting = planned(budget, &device);
  setting.options.device_budget_is_a_wish = true;
  Rig rig(setting);
  for (int step = 0; step < kUntilSettled; ++step) {
    CAPTURE(step);
    const auto plan = rig.offloader().plan_report();  // the step's own: after it there may be another
    device.start_peak();
    check_same({expected, ""}, {convolutions(&rig.offloader()), ""});
    if (plan) {
      INFO(rig.offloader().explain());
      CHECK(device.peak() <= std::max(plan->budget_bytes, plan->predicted.peak_bytes));
    }
  }
  CHECK(moved(rig) > 0);
  CHECK(rig.offloader().plan_report());
}

TEST_CASE_METHOD(NoLeak, "less memory is planned for where more time is allowed, down to the least") {
  MeteredDevice device;
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

TEST_CASE_METHOD(NoLeak, "a plan counts what host memory there is") {
  MeteredDevice device;
  Setting setting = planned(DeviceBytes{between(device, 0.3)}, &device);
  setting.options.capacity_bytes = 8 * kMatrix;
  setting.options.device_budget_is_a_wish = true;
  Rig rig(setting);
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes <= 8 * kMatrix);
  const std::uint64_t refused = rig.stats().kept_for(KeptReason::kNoRoom).tensors;
  train_step(&rig.offloader());
  CHECK(rig.stats().kept_for(KeptReason::kNoRoom).tensors == refused);
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
