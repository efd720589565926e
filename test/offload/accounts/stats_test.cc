// The numbers: that they add up, mean what they say, and that the order of backward is learned.

#include <algorithm>
#include <array>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::uint64_t kFloat = sizeof(float);

at::Tensor network(Inputs& in) {
  at::Tensor x = in.activation({5, 8});
  for (int layer = 0; layer < 3; ++layer) {
    x = at::linear(x, in.leaf({8, 8})).sigmoid() * x.sin() * at::ones({8});
  }
  return at::cat({x, in.activation({0, 8}).pow(2)});
}

TEST_CASE_METHOD(NoLeak, "every save is offloaded, deduplicated or kept for one reason") {
  for (Setting setting : all_settings()) {
    INFO(setting.name);
    setting.options.policy = minimum_size(33 * kFloat);
    Rig rig(setting);
    for (int step = 0; step < 3; ++step) {
      (void)outcome(train(network, step % 2 == 0), Run(&rig.offloader()));
      const Stats stats = rig.stats();
      std::uint64_t kept = 0;
      for (const Count& count : stats.kept) {
        kept += count.tensors;
      }
      CHECK(stats.saved.tensors == stats.offloaded.tensors + stats.deduplicated.tensors + kept);
      CHECK(stats.fetched.tensors <= stats.offloaded.tensors);
      CHECK(stats.fetched.bytes <= stats.offloaded.bytes);
      CHECK(stats.offloaded.tensors > 0);
      CHECK(stats.kept_for(KeptReason::kParameter).tensors > 0);
      CHECK(stats.kept_for(KeptReason::kPolicy).tensors > 0);
      CHECK(stats.kept_for(KeptReason::kEmpty).tensors > 0);
    }
  }
}

TEST_CASE_METHOD(NoLeak, "the counts of a known graph are exact") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = in.activation({10}).sin().pow(2).sum() + in.activation({30}).exp().sum();
  }
  const Stats after_forward = rig.stats();
  CHECK(after_forward.saved.tensors == 3);
  CHECK(after_forward.saved.bytes == (10 + 10 + 30) * kFloat);
  CHECK(after_forward.offloaded.tensors == 3);
  CHECK(after_forward.offloaded.bytes == (10 + 10 + 30) * kFloat);
  CHECK(after_forward.fetched.tensors == 0);
  CHECK(after_forward.steps == 1);
  CHECK(after_forward.saved_on_device.now_bytes == 0);
  CHECK(after_forward.saved_on_device.peak_bytes == 30 * kFloat);
  CHECK(after_forward.stash.peak_bytes == 30 * kFloat);
  CHECK(after_forward.pool.now_bytes == after_forward.pool.peak_bytes);
  CHECK(after_forward.stalls == 3);
  loss.backward();
  const Stats after_backward = rig.stats();
  CHECK(after_backward.fetched.tensors == 3);
  CHECK(after_backward.fetched.bytes == (10 + 10 + 30) * kFloat);
  CHECK(after_backward.reused.tensors == 0);
  CHECK(after_backward.pool.now_bytes == 0);
  CHECK(after_backward.steps == 1);
}

TEST_CASE_METHOD(NoLeak, "resetting sets counts to zero and peaks to the present levels") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = in.activation({1000}).pow(2).sum();
  }
  rig.offloader().reset_stats();
  const Stats stats = rig.stats();
  CHECK(stats.saved.tensors == 0);
  CHECK(stats.saved.bytes == 0);
  CHECK(stats.offloaded.tensors == 0);
  CHECK(stats.stalls == 0);
  CHECK(stats.steps == 0);
  CHECK(stats.stash.peak_bytes == 0);
  CHECK(stats.saved_on_device.peak_bytes == 0);
  CHECK(stats.pool.now_bytes > 0);
  loss.backward();
  CHECK(rig.stats().fetched.tensors == 1);
  CHECK(rig.stats().saved_on_device.peak_bytes == 1000 * kFloat);
  CHECK(rig.stats().stalls == 1);
}

TEST_CASE_METHOD(NoLeak, "a forward pass is a step, however many guards it has and wherever its backward is") {
  Rig rig(late());
  const auto run_steps = [&](bool guard_around_all, bool backward_in_guard, bool retain_graphs = false) {
    rig.offloader().reset_stats();
    Tensors retained;
    auto around = guard_around_all ? std::make_unique<OffloadGuard>(rig.offloader()) : nullptr;
    for (int step = 0; step < 3; ++step) {
      Inputs in;
      at::Tensor x = in.activation({8});
      std::unique_ptr<OffloadGuard> guard;
      for (int layer = 0; layer < 4; ++layer) {
        guard.reset();
        guard = std::make_unique<OffloadGuard>(rig.offloader());
        x = x.sin();
      }
      if (!backward_in_guard) {
        guard.reset();
      }
      const at::Tensor loss = x.sum();
      loss.backward({}, retain_graphs);
      if (retain_graphs) {
        retained.push_back(loss);
      }
    }
    return rig.stats().steps;
  };
  CHECK(run_steps(false, false) == 3);
  CHECK(run_steps(false, true) == 3);
  CHECK(run_steps(true, false) == 3);
  CHECK(run_steps(true, true) == 3);
  CHECK(run_steps(false, false, true) == 3);
  CHECK(run_steps(true, true, true) == 3);
}

TEST_CASE_METHOD(NoLeak, "the stash stays within its bound, and the window within its own") {
  for (const Schedule schedule : {Schedule::kLate, Schedule::kEarly}) {
    Setting setting = late();
    setting.schedule = schedule;
    setting.options.stash_bytes = 250 * kFloat;
    setting.options.window_bytes = 350 * kFloat;
    Rig rig(setting);
    const Program program = train(
        [](Inputs& in) {
          at::Tensor x = in.activation({100});
          for (int i = 0; i < 12; ++i) {
            x = x.sin();
          }
          return x;
        },
        false);
    (void)outcome(program, Run(&rig.offloader()));
    const Stats stats = rig.stats();
    CHECK(stats.stash.capacity_bytes == 250 * kFloat);
    CHECK(stats.stash.peak_bytes == (schedule == Schedule::kEarly ? 100 : 200) * kFloat);
    CHECK(stats.window.capacity_bytes == 350 * kFloat);
    CHECK(stats.window.peak_bytes == 300 * kFloat);
    CHECK(stats.saved_on_device.peak_bytes < 800 * kFloat);
    CHECK(stats.saved.bytes >= 1200 * kFloat);
  }
}

TEST_CASE_METHOD(NoLeak, "an odd order of backward is learned: the next step prefetches what comes next in it") {
  Setting setting = late_without_stash();
  setting.options.window_bytes = 300 * kFloat;
  Rig rig(setting);
  const bool one_guard = GENERATE(false, true);
  const auto around = one_guard ? std::make_unique<OffloadGuard>(rig.offloader()) : nullptr;
  std::vector<std::uint64_t> ahead;
  for (int step = 0; step < 2; ++step) {
    std::array<Inputs, 3> in;
    Tensors losses;
    {
      const OffloadGuard guard(rig.offloader());
      for (std::int64_t i = 0; i < 3; ++i) {
        losses.push_back(in[i].activation({100 * (i + 1)}).pow(2).sum());
      }
    }
    for (const int i : {0, 2, 1}) {
      losses[i].backward();
      ahead.push_back(rig.stats().window.now_bytes / kFloat);
    }
  }
  // By the reverse order of saving nothing follows the first save; after the third one comes the second.
  CHECK(ahead == std::vector<std::uint64_t>{0, 200, 0, 300, 200, 0});
  CHECK(rig.stats().fetched.tensors == 6);
}

TEST_CASE_METHOD(NoLeak, "what was prefetched is dropped with its graph") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor needed;
  at::Tensor dropped;
  {
    const OffloadGuard guard(rig.offloader());
    dropped = in.activation({100}).pow(2).sum();
    needed = in.activation({100}).pow(2).sum();
  }
  needed.backward();
  CHECK(rig.stats().window.now_bytes == 100 * kFloat);
  dropped.reset();
  CHECK(rig.stats().window.now_bytes == 0);
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "the timeline ends at zero, peaks where the statistics do, and marks backward") {
  Setting setting = late();
  setting.options.record_timeline = true;
  Rig rig(setting);
  (void)outcome(train(network, true), Run(&rig.offloader()));
  rig.offloader().drain();
  const std::vector<TimelineSample> samples = rig.offloader().take_timeline();
  REQUIRE(samples.size() > 2);
  const auto less = [](const TimelineSample& a, const TimelineSample& b) {
    return a.saved_on_device < b.saved_on_device;
  };
  CHECK(std::ranges::max_element(samples, less)->saved_on_device == rig.stats().saved_on_device.peak_bytes);
  CHECK(samples.back().saved_on_device == 0);
  CHECK_FALSE(samples.front().backward);
  CHECK(std::ranges::any_of(samples, &TimelineSample::backward));
  CHECK(std::ranges::is_sorted(samples, {}, &TimelineSample::ms));
  CHECK(rig.offloader().take_timeline().empty());
}

TEST_CASE_METHOD(NoLeak, "no timeline is recorded unless it was asked for") {
  Rig rig(late());
  (void)outcome(train(network, true), Run(&rig.offloader()));
  CHECK(rig.offloader().take_timeline().empty());
}

}  // namespace
}  // namespace ebb
