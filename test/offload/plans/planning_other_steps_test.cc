// Steps that are not those that were planned: other kinds, dropped ones, failed ones, and graphs beside them.

#include <cstdint>
#include <functional>
#include <stdexcept>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>

#include "test/offload/plans/planning_rig.h"

namespace ebb {
namespace {

using Catch::Contains;

TEST_CASE_METHOD(NoLeak, "another kind of step is recorded anew, and both plans are kept") {
  MeteredDevice device;
  // No step of 128 rows is sure to fit within these bytes, and each does: a plan's peak may be one storage too high.
  constexpr std::uint64_t kStorage = 128 * 64 * sizeof(float);
  Rig rig(planned(DeviceBytes{plain_peak(device, 128) + kStorage}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  CHECK(moved_by_step(rig, 128) > 0);  // it strays
  CHECK(moved_by_step(rig, 128) > kLayers);
  CHECK(moved_by_step(rig, 128) == 0);
  CHECK(moved_by_step(rig) == 0);
  CHECK(moved_by_step(rig, 128) == 0);
}

TEST_CASE_METHOD(NoLeak, "steps of all lengths follow plans, once two are known, and keep to the budget") {
  MeteredDevice device;
  const std::uint64_t budget = plain_peak(device, 128) * 4 / 5;
  Rig rig(planned(DeviceBytes{budget}, &device));
  for (const std::int64_t rows : {80, 70, 120}) {
    CHECK(moved_by_step(rig, rows) > kLayers);
  }
  for (const std::int64_t rows : {72, 128, 101, 64, 127, 96, 115, 66, 128, 111}) {
    CAPTURE(rows);
    const std::uint64_t before = moved(rig);
    device.start_peak();
    const Tensors found = train_step(&rig.offloader(), rows);
    CHECK(device.peak() <= budget);
    CHECK((moved(rig) == before) == (rows <= 80));
    check_same({train_step(nullptr, rows), ""}, {found, ""});
  }
}

TEST_CASE_METHOD(NoLeak, "steps that are never alike are left alone where they fit whole") {
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{4 * plain_peak(device)}, &device));
  for (int step = 0; step < kUntilPlanned; ++step) {
    CHECK(moved_by_step(rig, 64 + step) > kLayers);
  }
  for (int step = 0; step < kUntilSettled; ++step) {
    CHECK(moved_by_step(rig, 70 + step) == 0);
  }
}

TEST_CASE_METHOD(NoLeak, "evaluation and other graphs between do not disturb the recording") {
  MeteredDevice device;
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
  MeteredDevice device;
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
  MeteredDevice device;
  Rig rig(planned(LeastMemory{}, &device));
  for (int step = 0; step < kUntilSettled + 2; ++step) {
    Inputs in;
    at::Tensor loss;
    const auto plan = rig.offloader().plan_report();
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
    if (plan) {
      CHECK(device.peak() <= plan->predicted.peak_bytes);
    }
  }
}

TEST_CASE_METHOD(NoLeak, "a step that strays from its plan after another graph's backward has begun on it is right") {
  MeteredDevice device;
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

TEST_CASE_METHOD(NoLeak, "a step that differentiates its gradients, or goes back twice, after planned ones is right") {
  const bool twice = GENERATE(false, true);
  MeteredDevice device;
  Rig rig(planned(DeviceBytes{between(device, 0.2)}, &device));
  for (int step = 0; step < kUntilSettled; ++step) {
    train_step(&rig.offloader());
  }
  const auto other = [&](Offloader* offloader) {
    Inputs in;
    const Run run(offloader);
    const auto guard = run.guard();
    const at::Tensor loss = network(in);
    if (twice) {
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      return in.gradients();
    }
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    at::Tensor penalty = at::zeros({});
    for (const at::Tensor& gradient : in.gradients()) {
      penalty = penalty + gradient.pow(2).sum();
    }
    penalty.backward();
    for (const at::Tensor& gradient : in.gradients()) {
      gradient.detach_();  // or leaf and gradient would own each other
    }
    return in.gradients();
  };
  for (int step = 0; step < 3; ++step) {
    check_same({other(nullptr), ""}, {other(&rig.offloader()), ""});
  }
}

TEST_CASE_METHOD(NoLeak, "a backward that fails is not learned from") {
  MeteredDevice device;
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
  MeteredDevice device;
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

}  // namespace
}  // namespace ebb
