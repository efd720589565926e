// Checkpointed regions under a plan: run again, or once where what they save may stay.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>

#include "offload/checkpoint.h"
#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using Catch::Contains;

constexpr std::int64_t kRows = 64;
constexpr int kRegions = 6;
constexpr std::int64_t kEarlier = 16;  // matrices saved before a region that saves half as many

struct Runs {
  int count = 0;
};

// Each region saves what cannot be recomputed but by running it again.
CheckpointedFunction region(const at::Tensor& weight, const std::shared_ptr<Runs>& runs, bool dropout) {
  return [weight, runs, dropout](const Tensors& x) -> Tensors {
    ++runs->count;
    at::Tensor y = at::tanh(x[0].matmul(weight));
    for (int i = 0; i < 3; ++i) {
      y = at::sigmoid(at::tanh(y));
      if (dropout) {
        y = at::dropout(y, 0.2, /*train=*/true);
      }
    }
    return {y + x[0]};
  };
}

struct Step {
  Tensors gradients;
  int runs;
};

Step train(Offloader* offloader, bool dropout = false, int regions = kRegions) {
  Inputs in;
  at::manual_seed(7);
  const Run run(offloader);
  const auto guard = run.guard();
  const auto runs = std::make_shared<Runs>();
  at::Tensor x = in.activation({kRows, kRows});
  for (int i = 0; i < regions; ++i) {
    const CheckpointedFunction function = region(in.leaf({kRows, kRows}), runs, dropout);
    x = offloader == nullptr ? function({x})[0] : checkpoint(function, {x})[0];
  }
  in.loss(x).backward();
  Tensors all = in.gradients();
  all.push_back(at::rand({4}));  // the random state afterwards
  return {all, runs->count};
}

std::uint64_t peak_without_ebb(MeteredDevice& meter) {
  train(nullptr);
  meter.start_peak();
  train(nullptr);
  return meter.peak();
}

TEST_CASE_METHOD(NoLeak, "regions run once where what they save fits, and twice until that is known") {
  const Tensors expected = train(nullptr).gradients;
  MeteredDevice meter;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &meter));
  for (int step = 0; step < kUntilSettled; ++step) {
    const Step found = train(&rig.offloader());
    check_same({expected, ""}, {found.gradients, ""});
    CHECK(found.runs == (step < kUntilPlanned ? 2 * kRegions : kRegions));
  }
  CHECK(rig.offloader().plan_report().value().predicted.recomputed_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "copies in start as backward uses what a region has kept") {
  MeteredDevice meter;
  std::uint64_t ahead = 0;  // of what was saved before the region, when backward is about to ask for it
  int runs = 0;
  const auto step = [&](Offloader& offloader) {
    Inputs in;
    const Run run(&offloader);
    const auto guard = run.guard();
    at::Tensor x = in.activation({kEarlier * kRows, kRows}).neg().sigmoid().narrow(0, 0, kRows);
    x.register_hook([&](const at::Tensor& /*gradient*/) { ahead = offloader.stats().window.now_bytes; });
    const auto counted = std::make_shared<Runs>();
    const auto saves_results = [counted](const Tensors& of) -> Tensors {  // and not its input
      ++counted->count;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // too long to run again
      at::Tensor y = of[0];
      for (int i = 0; i < kEarlier / 2; ++i) {
        y = y.neg().sigmoid();
      }
      return {y};
    };
    x = checkpoint(saves_results, {x.neg()})[0];
    at::Tensor loss;
    {
      const auto head = run.no_op();
      loss = in.loss(x);
    }
    // Backward begins with the step's peak: no copy has room there.
    x.register_hook([](const at::Tensor& /*gradient*/) { at::empty({64 * kRows, kRows}); });
    loss.backward();
    runs = counted->count;
  };
  Rig unlimited(planned(DeviceBytes{kUnlimited}, &meter));
  for (int i = 0; i < kUntilPlanned; ++i) {
    step(unlimited.offloader());
  }
  const std::uint64_t all_kept = unlimited.offloader().plan_report().value().predicted.peak_bytes;
  Rig rig(planned(DeviceBytes{all_kept - kEarlier * kMatrix}, &meter));
  for (int i = 0; i < kUntilSettled; ++i) {
    step(rig.offloader());
  }
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes == kEarlier * kMatrix);
  REQUIRE(runs == 1);
  CHECK(ahead == kEarlier * kMatrix);
}

TEST_CASE_METHOD(NoLeak, "regions are run again as the budget needs it, within it, with plain autograd's gradients") {
  const bool dropout = GENERATE(false, true);
  const double share = GENERATE(0.45, 0.75, 0.85);
  CAPTURE(dropout, share);
  const Tensors expected = train(nullptr, dropout).gradients;
  MeteredDevice meter;
  const auto budget = static_cast<std::uint64_t>(share * static_cast<double>(peak_without_ebb(meter)));
  Setting setting = planned(DeviceBytes{budget}, &meter);
  setting.options.device_budget_is_a_wish = true;
  setting.options.capacity_bytes = 8 * kMatrix;  // so that few may move
  Rig rig(setting);
  int runs = 0;
  for (int step = 0; step < kUntilSettled; ++step) {
    meter.start_peak();
    const Step found = train(&rig.offloader(), dropout);
    check_same({expected, ""}, {found.gradients, ""});
    runs = found.runs;
    const auto report = rig.offloader().plan_report();
    if (step >= kUntilPlanned && report && report->fits) {
      CHECK(meter.peak() <= budget);
    }
  }
  CHECK(runs > kRegions);
  CHECK(runs <= 2 * kRegions);
  REQUIRE(rig.offloader().plan_report());
  INFO(rig.offloader().explain());
  CHECK((share < 0.5 || rig.offloader().plan_report()->fits));
  CHECK_THAT(rig.offloader().explain(), Contains("KiB  recompute less than copying"));
}

TEST_CASE_METHOD(NoLeak, "what a region saves may move as anything else does, and its function runs once then") {
  MeteredDevice meter;
  Rig rig(planned(LeastMemory{}, &meter));
  const auto slow = [](const Tensors& x) -> Tensors {  // to run again takes longer than any copy
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return {at::sigmoid(at::tanh(at::sigmoid(at::tanh(x[0]))))};
  };
  int runs = 0;
  const auto step = [&](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    const auto guard = run.guard();
    at::Tensor x = in.activation({kRows, kRows});
    for (int i = 0; i < kRegions; ++i) {
      const CheckpointedFunction function = [&](const Tensors& inputs) {
        ++runs;
        return slow(inputs);
      };
      x = offloader == nullptr ? function({x})[0] : checkpoint(function, {x})[0];
    }
    in.loss(x).backward();
    return in.gradients();
  };
  const Tensors plain = step(nullptr);
  for (int i = 0; i < kUntilSettled; ++i) {
    runs = 0;
    check_same({plain, ""}, {step(&rig.offloader()), ""});
  }
  INFO(rig.offloader().explain());
  CHECK(runs == kRegions);
  REQUIRE(rig.offloader().plan_report());
  CHECK(rig.offloader().plan_report()->predicted.offloaded_bytes > 0);
}

TEST_CASE_METHOD(NoLeak, "what may be recomputed is, once a second run has made the same bytes") {
  const bool counts = GENERATE(false, true);  // a function that computes something else each time
  MeteredDevice meter;
  Setting setting = planned(LeastMemory{}, &meter);
  setting.options.capacity_bytes = kMatrix / 4;  // so that nothing moves
  Rig rig(setting);
  int runs = 0;
  const auto step = [&](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    const auto guard = run.guard();
    at::Tensor x = in.activation({kRows, kRows});
    const at::Tensor weight = in.leaf({kRows, kRows});
    runs = 0;
    for (int i = 0; i < kRegions; ++i) {
      const CheckpointedFunction function = [&runs, weight, counts](const Tensors& inputs) -> Tensors {
        ++runs;
        return {at::sigmoid(at::tanh(inputs[0].matmul(weight) * (counts ? runs : 1)))};
      };
      x = offloader == nullptr ? function({x})[0] : recomputable(function, {x})[0];
    }
    in.loss(x).backward();
    return in.gradients();
  };
  const Tensors plain = step(nullptr);
  for (int i = 0; i < kUntilSettled; ++i) {
    check_same({plain, ""}, {step(&rig.offloader()), ""});
    CHECK((runs > kRegions || counts || i == 0));
  }
  CHECK((runs == kRegions) == counts);
}

TEST_CASE_METHOD(NoLeak,
                 "what may be recomputed is not where its inputs are written to, and without a plan only runs") {
  const at::Tensor state = at::zeros({kRows, kRows});
  int runs = 0;
  const auto step = [&](Offloader* offloader) {
    Inputs in;
    state.zero_();
    const Run run(offloader);
    const auto guard = run.guard();
    const CheckpointedFunction function = [&runs](const Tensors& inputs) -> Tensors {
      ++runs;
      {
        const at::NoGradGuard no_grad;
        inputs[1].add_(1);
      }
      return {at::sigmoid(at::tanh(inputs[0]))};
    };
    runs = 0;
    const at::Tensor x = in.activation({kRows, kRows});
    const at::Tensor y = recomputable(function, {x, state})[0];
    in.loss(y).backward();
    return in.gradients();
  };
  const Tensors plain = step(nullptr);
  MeteredDevice meter;
  Setting setting = planned(LeastMemory{}, &meter);
  Rig rig(setting);
  for (int i = 0; i < kUntilSettled; ++i) {
    check_same({plain, ""}, {step(&rig.offloader()), ""});
    CHECK(runs == 1);
    CHECK(state.equal(at::ones({kRows, kRows})));
  }
}

TEST_CASE_METHOD(NoLeak, "a step with other regions than planned is right, and gets a plan of its own") {
  MeteredDevice meter;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &meter));
  for (int step = 0; step < 4; ++step) {
    train(&rig.offloader());
  }
  const Tensors expected = train(nullptr, false, 3).gradients;
  int runs = 0;
  for (int step = 0; step < 6; ++step) {
    const Step found = train(&rig.offloader(), false, 3);
    check_same({expected, ""}, {found.gradients, ""});
    runs = found.runs;
  }
  CHECK(runs == 3);
  CHECK(train(&rig.offloader()).runs == kRegions);
}

TEST_CASE_METHOD(NoLeak, "a region inside a region is not the plan's affair") {
  const auto step = [](Offloader* offloader, Runs& outer_runs, Runs& inner_runs) {
    Inputs in;
    const at::Tensor weight = in.leaf({kRows, kRows});
    const Run run(offloader);
    const auto guard = run.guard();
    const CheckpointedFunction inner = [&](const Tensors& x) -> Tensors {
      ++inner_runs.count;
      return {at::tanh(at::tanh(x[0]))};
    };
    const CheckpointedFunction outer = [&](const Tensors& x) -> Tensors {
      ++outer_runs.count;
      const at::Tensor y = at::sigmoid(x[0].matmul(weight));
      return {(offloader == nullptr ? inner({y}) : checkpoint(inner, {y}))[0] * 2};
    };
    const at::Tensor x = in.activation({kRows, kRows});
    in.loss((offloader == nullptr ? outer({x}) : checkpoint(outer, {x}))[0]).backward();
    return in.gradients();
  };
  Runs ignored;
  const Tensors expected = step(nullptr, ignored, ignored);
  MeteredDevice meter;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &meter));
  for (int i = 0; i < kUntilSettled; ++i) {
    Runs outer;
    Runs inner;
    check_same({expected, ""}, {step(&rig.offloader(), outer, inner), ""});
    CHECK(outer.count == (i < kUntilPlanned ? 2 : 1));
    CHECK(inner.count >= 2);
  }
}

TEST_CASE_METHOD(NoLeak, "what a region leaves on the device may be evicted, written to, and used twice") {
  MeteredDevice meter;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &meter));
  for (int i = 0; i < kUntilSettled; ++i) {
    train(&rig.offloader());
  }
  const auto run_and = [&](const std::function<void(at::Tensor&)>& act) {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    const auto runs = std::make_shared<Runs>();
    at::Tensor x = in.activation({kRows, kRows});
    for (int i = 0; i < kRegions; ++i) {
      x = checkpoint(region(in.leaf({kRows, kRows}), runs, false), {x})[0];
    }
    CHECK(runs->count == kRegions);
    act(x);
    const at::Tensor loss = in.loss(x);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return in.gradients();
  };
  const Tensors expected = run_and([](at::Tensor& /*x*/) {});
  const std::uint64_t before = rig.stats().evicted.tensors;
  const Tensors found = run_and([&](at::Tensor& /*x*/) { CHECK(rig.offloader().evict(kUnlimited) > 0); });
  CHECK(rig.stats().evicted.tensors > before);
  check_same({expected, ""}, {found, ""});

  Inputs in;
  const OffloadGuard guard(rig.offloader());
  at::Tensor inside;
  const at::Tensor weight = in.leaf({kRows, kRows});
  const CheckpointedFunction writes = [&](const Tensors& y) -> Tensors {
    inside = at::tanh(y[0].matmul(weight));
    return {at::sigmoid(inside * inside)};
  };
  const at::Tensor out = checkpoint(writes, {in.activation({kRows, kRows})})[0];
  {
    const at::NoGradGuard no_history;
    inside.add_(1);
  }
  CHECK_THROWS_WITH(out.sum().backward(), Contains("modified by an inplace operation"));
  forget_failed_backward();
}

TEST_CASE_METHOD(NoLeak, "a function that throws leaves nothing, under a plan too") {
  MeteredDevice meter;
  Rig rig(planned(DeviceBytes{std::uint64_t{1} << 40}, &meter));
  const CheckpointedFunction throws = [](const Tensors& x) -> Tensors {
    const at::Tensor saved = at::tanh(at::tanh(x[0]));
    throw std::runtime_error("the function's");
  };
  for (int i = 0; i < kUntilSettled; ++i) {
    train(&rig.offloader());
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    CHECK_THROWS_WITH(checkpoint(throws, {in.activation({kRows, kRows})}), Contains("the function's"));
  }
  const Step last = train(&rig.offloader());
  check_same({train(nullptr).gradients, ""}, {last.gradients, ""});
}

}  // namespace
}  // namespace ebb
