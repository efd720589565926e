#include "policy/goal_planner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "policy/step_planner.h"

namespace ebb {
namespace {

constexpr std::uint64_t kWeight = 100;  // bytes
constexpr std::uint64_t kSaved = 60;
constexpr std::uint64_t kOther = 50;              // besides managed storages
constexpr std::uint64_t kRecorded = 2 * kWeight;  // of managed storages on the device

struct Kind {
  std::size_t layers = 8;
  double layer_ms = 10;        // of compute, forward and backward each
  double recompute_ms = 2;     // of a layer's saved storage
  bool has_optimizer = false;  // that takes states of each layer between steps
};

// A step through layers, each with a weight that is managed and a storage that is saved.
StepRecord step_of(const Kind& kind) {
  StepRecord record;
  const auto layers = static_cast<double>(kind.layers);
  for (std::size_t i = 0; i < kind.layers; ++i) {
    const auto at = static_cast<double>(i);
    record.storages.push_back({.bytes = kSaved,
                               .saved_ms = (at + 1) * kind.layer_ms,
                               .idle_ms = (at + 1) * kind.layer_ms,
                               .needed_ms = (2 * layers - at - 1) * kind.layer_ms,
                               .released_ms = (2 * layers - at) * kind.layer_ms,
                               .other_bytes = kOther + kRecorded,
                               .recompute = Recompute::kComputeBound,
                               .recompute_ms = kind.recompute_ms});
  }
  record.other = {{0, kOther + kRecorded}};
  record.backward_ms = layers * kind.layer_ms;
  record.end_ms = 2 * layers * kind.layer_ms;
  const auto use = [&](std::size_t item, Phase phase, bool written) {
    record.managed.push_back({.item = static_cast<std::uint32_t>(item),
                              .operation = static_cast<std::uint32_t>(record.managed.size()),
                              .bytes = kWeight,
                              .phase = phase,
                              .written = written});
  };
  for (std::size_t i = 0; i < kind.layers; ++i) {
    use(i, Phase::kForward, false);
  }
  for (std::size_t i = kind.layers; i-- > 0;) {
    use(i, Phase::kBackward, false);
  }
  for (std::size_t i = 0; kind.has_optimizer && i < kind.layers; ++i) {
    use(i, Phase::kBetween, true);
    use(kind.layers + i, Phase::kBetween, true);
  }
  record.managed_device_bytes = kRecorded;
  return record;
}

LinkRates link(double bytes_per_ms) {
  return {.out_bytes_per_ms = bytes_per_ms, .in_bytes_per_ms = bytes_per_ms, .ms_per_copy = 0};
}

TEST_CASE("Where all fits all is on the device, and the step takes its compute") {
  const StepRecord record = step_of({});
  const Plan plan = make_plan(record, DeviceBytes{10'000}, kUnlimited, link(100));
  REQUIRE(plan.fits);
  REQUIRE(plan.managed);
  CHECK(plan.managed->traffic.bytes() == 0);
  CHECK(plan.predicted.offloaded_bytes == 0);
  CHECK(plan.predicted.recomputed_bytes == 0);
  CHECK(plan.predicted.step_ms == record.end_ms);
  CHECK(plan.predicted.peak_bytes == kOther + 8 * (kWeight + kSaved));
}

TEST_CASE("A plan that fits is within its budget with what it leaves to managed storages") {
  const StepRecord record = step_of({.has_optimizer = true});
  for (const double rate : {5.0, 100.0}) {
    for (std::uint64_t budget = 200; budget < 2400; budget += 400) {
      const Plan plan = make_plan(record, DeviceBytes{budget}, kUnlimited, link(rate));
      INFO("budget " << budget << ", rate " << rate);
      REQUIRE(plan.managed);
      CHECK(plan.fits == (plan.predicted.peak_bytes <= budget));
      CHECK(predict(plan, record, link(rate)).peak_bytes == plan.predicted.peak_bytes);
      if (plan.fits) {
        CHECK(std::min(plan.managed->device_bytes, 16 * kWeight) + kOther <= budget);
      }
    }
  }
}

TEST_CASE("What fits nowhere gets the least memory, which is a budget that can be met") {
  const StepRecord record = step_of({});
  const Plan least = make_plan(record, DeviceBytes{100}, kUnlimited, link(20));
  REQUIRE_FALSE(least.fits);
  CHECK(least.predicted.peak_bytes > 100);
  const Plan met = make_plan(record, DeviceBytes{least.predicted.peak_bytes}, kUnlimited, link(20));
  CHECK(met.fits);
}

double period_ms(const Plan& plan) { return plan.predicted.step_ms + plan.managed->between_ms; }

TEST_CASE("A larger budget never makes the period much longer") {
  for (const bool has_optimizer : {false, true}) {
    const StepRecord record = step_of({.has_optimizer = has_optimizer});
    std::optional<double> before;
    for (std::uint64_t budget = 400; budget < 2600; budget += 200) {
      const Plan plan = make_plan(record, DeviceBytes{budget}, kUnlimited, link(10));
      if (!plan.fits) {
        continue;
      }
      INFO("budget " << budget);
      if (before) {
        CHECK(period_ms(plan) < *before * 1.03);
      }
      before = period_ms(plan);
    }
    REQUIRE(before);
  }
}

// The link takes 10 ms to fetch a weight, as long as a layer's compute, so managed storages take all that they are
// given.
TEST_CASE("Cheap recipes leave the device to weights, dear ones to what is saved") {
  const LinkRates slow = link(5);
  const Plan cheap = make_plan(step_of({.recompute_ms = 0.1}), DeviceBytes{900}, kUnlimited, slow);
  const Plan dear = make_plan(step_of({.recompute_ms = 100}), DeviceBytes{900}, kUnlimited, slow);
  REQUIRE(cheap.fits);
  REQUIRE(dear.fits);
  CHECK(cheap.predicted.recomputed_bytes > 0);
  CHECK(dear.predicted.recomputed_bytes == 0);
  CHECK(dear.managed->device_bytes < cheap.managed->device_bytes);
}

// States that only the optimizer uses, of 800 bytes in all.
StepRecord states_only() {
  StepRecord record = step_of({});
  record.managed.clear();
  for (std::uint32_t i = 0; i < 8; ++i) {
    record.managed.push_back({.item = i, .operation = i, .bytes = kWeight, .phase = Phase::kBetween, .written = true});
  }
  return record;
}

TEST_CASE("States that stay on the device take their room in the step, though the step does not use them") {
  const StepRecord record = states_only();
  for (std::uint64_t budget = 500; budget < 1400; budget += 200) {
    const Plan plan = make_plan(record, DeviceBytes{budget}, kUnlimited, link(100));
    INFO("budget " << budget);
    REQUIRE(plan.fits);
    CHECK(kOther + std::min(plan.managed->device_bytes, 8 * kWeight) + plan.predicted.kept_bytes <= budget);
  }
}

TEST_CASE("An operation between steps that takes more than the bound does not hold the bound up") {
  StepRecord record = step_of({});
  for (std::uint32_t i = 0; i < 6; ++i) {  // 600 bytes at once
    record.managed.push_back(
        {.item = 100 + i, .operation = 100, .bytes = kWeight, .phase = Phase::kBetween, .written = true});
  }
  const Plan plan = make_plan(record, DeviceBytes{500}, kUnlimited, link(100));
  CHECK(plan.fits);
  CHECK(plan.managed->device_bytes + kOther <= 500);
}

TEST_CASE("Recipes that run while the link is busy cost nothing") {
  const StepRecord record = step_of({.recompute_ms = 15});
  const Plan plan = make_plan(record, DeviceBytes{450}, kUnlimited, link(4));
  REQUIRE(plan.fits);
  REQUIRE(plan.predicted.recompute_ms > 60);
  const double in_ms = static_cast<double>(plan.managed->traffic.in[1].bytes) / 4;
  REQUIRE(in_ms > record.end_ms - record.backward_ms + plan.predicted.recompute_ms);
  const double forward_ms = std::max(record.backward_ms, static_cast<double>(plan.managed->traffic.in[0].bytes) / 4);
  // Lanes stand still while the first and the last layer of each phase compute.
  CHECK(plan.predicted.step_ms >= forward_ms + in_ms);
  CHECK(plan.predicted.step_ms < forward_ms + in_ms + 0.5 * plan.predicted.recompute_ms);
}

TEST_CASE("Copies beside a lane that managed storages fill take their own time, and no more") {
  StepRecord record = step_of({.layer_ms = 1});
  record.backward_ms += 0.1;  // after the last save
  for (StorageRecord& storage : record.storages) {
    storage.recompute = Recompute::kNo;
  }
  const Plan plan = make_plan(record, DeviceBytes{450}, kUnlimited, link(10));
  REQUIRE(plan.fits);
  REQUIRE(plan.predicted.offloaded_bytes > 0);
  const double forward_ms = static_cast<double>(plan.managed->traffic.in[0].bytes) / 10;
  const double backward_ms =
      static_cast<double>(plan.managed->traffic.in[1].bytes + plan.predicted.offloaded_bytes) / 10;
  REQUIRE(backward_ms > 3 * (record.end_ms - record.backward_ms));
  CHECK(plan.predicted.step_ms >= forward_ms + backward_ms);
  CHECK(plan.predicted.step_ms < 1.05 * (forward_ms + backward_ms));
}

TEST_CASE("Without a meter the record's other memory has no managed storages, and the plan adds what it leaves there") {
  StepRecord record = step_of({});
  record.other = {{0, 0}};
  for (StorageRecord& storage : record.storages) {
    storage.other_bytes = 0;
  }
  record.managed_device_bytes = 0;
  const Plan plan = make_plan(record, DeviceBytes{10'000}, kUnlimited, link(100));
  CHECK(plan.predicted.peak_bytes == 8 * (kWeight + kSaved));
}

TEST_CASE("A step without anything that is saved has a plan, too") {
  StepRecord record = step_of({});
  record.storages.clear();
  const Plan none = make_plan(record, DeviceBytes{700}, kUnlimited, link(10));
  CHECK(none.fits);
  CHECK(none.managed);
}

TEST_CASE("A slower link makes the step of a plan longer, through what is managed and what is saved") {
  const StepRecord record = step_of({.recompute_ms = 100});
  const Plan plan = make_plan(record, DeviceBytes{700}, kUnlimited, link(10));
  REQUIRE(plan.fits);
  CHECK(predict(plan, record, link(10)).step_ms == Approx(plan.predicted.step_ms).epsilon(0.02));
  CHECK(predict(plan, record, link(2)).step_ms > 1.5 * plan.predicted.step_ms);
}

TEST_CASE("The plan for bytes decides about managed storages, and other goals leave them") {
  const StepRecord record = step_of({});
  CHECK(make_plan(record, DeviceBytes{900}, kUnlimited, link(20)).managed);
  CHECK_FALSE(make_plan(record, LeastMemory{}, kUnlimited, link(20)).managed);
  CHECK_FALSE(make_plan(record, Slowdown{0.1}, kUnlimited, link(20)).managed);
}

// The link is what the step takes its time for, and each layer runs again.
TEST_CASE("A step whose compute was faster has its plan made again with the same copies") {
  const Kind slow{.recompute_ms = 8};
  const Kind fast{.layer_ms = 5, .recompute_ms = 4};
  const StepRecord record = step_of(slow);
  StepPlanner planner(DeviceBytes{500}, /*host_bytes=*/0, link(8), /*least_bytes=*/0);
  std::shared_ptr<const Plan> plan;
  const auto decide_all = [&] {
    planner.begin_step();
    for (const StorageRecord& storage : record.storages) {
      Candidate candidate;
      candidate.bytes = storage.bytes;
      candidate.recompute = storage.recompute;
      plan = planner.decide(candidate).plan;
    }
  };
  for (int i = 0; i < StepPlanner::kRecordedSteps; ++i) {
    decide_all();
    planner.learn(planner.recorded_step().value(), record);
  }
  decide_all();
  REQUIRE(plan != nullptr);
  REQUIRE(plan->managed);
  REQUIRE(plan->managed->recompute_ms > 0);
  Plan sooner = *plan;
  sooner.managed->recompute_ms /= 2;
  const double step_ms = predict(sooner, step_of(fast), link(8)).step_ms;
  planner.correct(plan, step_of(fast).end_ms, {step_ms, 0});
  const StepPlanner::Known known = *planner.last_plan();
  CHECK(known.record.end_ms == step_of(fast).end_ms);
  CHECK(known.correction.copy_slowdown == 1);
}

}  // namespace
}  // namespace ebb
