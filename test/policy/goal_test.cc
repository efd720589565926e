#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "bench/planning/random_step.h"
#include "policy/budget.h"
#include "policy/goal_planner.h"
#include "policy/planner.h"
#include "policy/predict.h"
#include "test/policy/two_storages.h"

namespace ebb {
namespace {

constexpr LinkRates kOneByteEachMs{.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0};
constexpr std::uint64_t kOtherBytes = RandomStep{}.other_bytes;

constexpr Decision kKeep = Decision::kKeep;
constexpr Decision kOffload = Decision::kOffload;
constexpr Decision kRecompute = Decision::kRecompute;

std::vector<std::vector<Decision>> all_decisions(const StepRecord& record) {
  std::vector<std::vector<Decision>> all{{}};
  for (const StorageRecord& storage : record.storages) {
    std::vector<std::vector<Decision>> longer;
    for (const std::vector<Decision>& decisions : all) {
      for (const Decision decision : {kKeep, kOffload, kRecompute}) {
        if (decision != kRecompute || storage.recompute != Recompute::kNo) {
          longer.push_back(decisions);
          longer.back().push_back(decision);
        }
      }
    }
    all = std::move(longer);
  }
  return all;
}

// The least peak of all plans under all limits that take at most `most_ms`.
std::uint64_t least_peak(const StepRecord& record, std::uint64_t host_bytes, double most_ms) {
  std::uint64_t least = kUnlimited;
  const std::vector<std::vector<Decision>> all = all_decisions(record);
  for (std::uint64_t limit = kOtherBytes; limit <= kOtherBytes + total_bytes(record); ++limit) {
    const Predictor predictor(record, limit, kOneByteEachMs);
    for (const std::vector<Decision>& decisions : all) {
      const Prediction found = predictor.predict(decisions);
      if (found.offloaded_bytes <= host_bytes && found.step_ms <= most_ms) {
        least = std::min(least, found.peak_bytes);
      }
    }
  }
  return least;
}

TEST_CASE("a goal of bytes is a limit on device memory") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20; ++i) {
    const StepRecord record = random_step(random, {.storages = 8});
    const std::uint64_t bytes = kOtherBytes + random() % total_bytes(record);
    const std::uint64_t host_bytes = random() % 2 == 0 ? kUnlimited : total_bytes(record) / 3;
    const Plan plan = make_plan(record, DeviceBytes{bytes}, host_bytes, kOneByteEachMs);
    const Plan same = make_plan(record, Limits{bytes, host_bytes}, kOneByteEachMs);
    CAPTURE(i, bytes, host_bytes);
    CHECK(plan.fits == same.fits);
    if (!plan.fits) {
      continue;
    }
    CHECK(plan.decisions == same.decisions);
    CHECK(plan.predicted.step_ms == same.predicted.step_ms);
    CHECK(plan.predicted.peak_bytes == same.predicted.peak_bytes);
    CHECK(plan.schedule.stash.after_save == same.schedule.stash.after_save);
  }
}

TEST_CASE("a goal of bytes that cannot be met does not fit") {
  CHECK(make_plan(two_storages(), DeviceBytes{15}, kUnlimited, kOneByteEachMs).fits);
  CHECK_FALSE(make_plan(two_storages(), DeviceBytes{14}, kUnlimited, kOneByteEachMs).fits);
}

TEST_CASE("a goal of bytes that would take more host memory than there is does not fit") {
  CHECK(make_plan(two_storages(), DeviceBytes{15}, 10, kOneByteEachMs).fits);
  const Plan plan = make_plan(two_storages(), DeviceBytes{15}, 9, kOneByteEachMs);
  CHECK_FALSE(plan.fits);
  CHECK(plan.predicted.offloaded_bytes <= 9);
}

TEST_CASE("no slowdown saves what hides behind compute") {
  const Plan plan = make_plan(two_storages_and_a_need(), Slowdown{0}, kUnlimited, kOneByteEachMs);
  CHECK(plan.fits);
  CHECK(plan.predicted.step_ms == 80);
  CHECK(plan.predicted.peak_bytes == 15);
}

TEST_CASE("no slowdown keeps all where nothing hides") {
  StepRecord record = two_storages();
  for (StorageRecord& storage : record.storages) {
    storage.bytes = 100;
  }
  const Plan plan = make_plan(record, Slowdown{0}, kUnlimited, kOneByteEachMs);
  CHECK(plan.fits);
  CHECK(plan.predicted.step_ms == 80);
  CHECK(plan.predicted.peak_bytes == kOtherBytes + 200);
}

TEST_CASE("a slowdown buys memory as far as it goes, and no further") {
  StepRecord record = two_storages();
  for (StorageRecord& storage : record.storages) {
    storage.recompute = Recompute::kMemoryBound;
    storage.bytes = 1000;
  }
  record.storages[0].recompute_ms = 8;
  record.storages[1].recompute_ms = 8;
  CHECK(make_plan(record, Slowdown{0.09}, kUnlimited, kOneByteEachMs).predicted.step_ms == 80);
  const Plan plan = make_plan(record, Slowdown{0.11}, kUnlimited, kOneByteEachMs);
  CHECK(plan.fits);
  CHECK(plan.predicted.step_ms == 88);
  CHECK(plan.predicted.peak_bytes == kOtherBytes + 1000);
}

TEST_CASE("a slowdown is kept to, and takes about the least memory of all plans that keep to it") {
  std::mt19937_64 random(2);
  int exact = 0;
  constexpr int kSteps = 40;
  for (int i = 0; i < kSteps; ++i) {
    const StepRecord record = random_step(random, {.storages = 2 + random() % 4});
    const double fraction = 0.05 * static_cast<double>(random() % 8);
    const std::uint64_t host_bytes = random() % 3 == 0 ? total_bytes(record) / 2 : kUnlimited;
    const Plan plan = make_plan(record, Slowdown{fraction}, host_bytes, kOneByteEachMs);
    const double most_ms = record.end_ms * (1 + fraction);
    const std::uint64_t least = least_peak(record, host_bytes, most_ms);
    CAPTURE(i, fraction, host_bytes, least);
    CHECK(plan.fits);
    CHECK(plan.predicted.step_ms <= most_ms);
    const Predictor with_its_room(record, plan.device_bytes, kOneByteEachMs);
    CHECK(with_its_room.predict(plan.decisions).step_ms == plan.predicted.step_ms);
    if (plan.device_bytes != kUnlimited) {
      CHECK(plan.schedule.backward.held_bytes[0] == plan.device_bytes - kOtherBytes);
    }
    CHECK(plan.predicted.offloaded_bytes <= host_bytes);
    CHECK(plan.predicted.peak_bytes <= least * 1.1);
    exact += plan.predicted.peak_bytes == least ? 1 : 0;
  }
  CAPTURE(exact);
  CHECK(exact * 10 >= kSteps * 9);
}

TEST_CASE("the least memory is a budget that can be met") {
  std::mt19937_64 random(5);
  for (int i = 0; i < 100; ++i) {
    const StepRecord record = random_step(random, {.storages = 2 + random() % 10});
    const Plan least = make_plan(record, LeastMemory{}, kUnlimited, kOneByteEachMs);
    const Plan plan = make_plan(record, DeviceBytes{least.predicted.peak_bytes}, kUnlimited, kOneByteEachMs);
    CAPTURE(i);
    CHECK(plan.fits);
    CHECK(plan.predicted.peak_bytes <= least.predicted.peak_bytes);
    CHECK_FALSE(make_plan(record, DeviceBytes{least.predicted.peak_bytes - 1}, kUnlimited, kOneByteEachMs).fits);
  }
}

TEST_CASE("a budget of the least memory can be met where no plan for that limit is within it") {
  StepRecord record;
  record.storages = {{.bytes = 20, .saved_ms = 3, .needed_ms = 34, .released_ms = 63},
                     {.bytes = 3, .saved_ms = 9, .idle_ms = 20, .needed_ms = 25, .released_ms = 52},
                     {.bytes = 18, .saved_ms = 16, .idle_ms = 19, .needed_ms = 19, .released_ms = 32}};
  record.other = {{0, 5}};
  record.backward_ms = 19;
  record.end_ms = 63;
  const std::uint64_t least = make_plan(record, LeastMemory{}, kUnlimited, kOneByteEachMs).predicted.peak_bytes;
  REQUIRE_FALSE(make_plan(record, Limits{.device_bytes = least}, kOneByteEachMs).fits);
  const Plan plan = make_plan(record, DeviceBytes{least}, kUnlimited, kOneByteEachMs);
  CHECK(plan.fits);
  CHECK(plan.predicted.peak_bytes == least);
  CHECK(plan.device_bytes == 0);  // compute waits for every copy
}

TEST_CASE("the least memory is that of all plans, at any cost") {
  std::mt19937_64 random(3);
  for (int i = 0; i < 40; ++i) {
    const StepRecord record = random_step(random, {.storages = 2 + random() % 4});
    const std::uint64_t host_bytes = random() % 3 == 0 ? total_bytes(record) / 2 : kUnlimited;
    const Plan plan = make_plan(record, LeastMemory{}, host_bytes, kOneByteEachMs);
    CAPTURE(i, host_bytes);
    CHECK(plan.fits);
    CHECK(plan.predicted.offloaded_bytes <= host_bytes);
    CHECK(plan.predicted.peak_bytes == least_peak(record, host_bytes, 1e9));
  }
}

TEST_CASE("the least memory costs no time that does not save any") {
  StepRecord record = two_storages();
  record.storages[0].released_ms = 75;
  record.other = {{0, 5}, {76, 500}, {77, 5}};  // no plan has a lower peak
  const Plan plan = make_plan(record, LeastMemory{}, kUnlimited, kOneByteEachMs);
  CHECK(plan.predicted.peak_bytes == 500);
  CHECK(plan.predicted.step_ms == 80);
}

TEST_CASE("goals without bytes fit without host memory, and offload nothing") {
  const Goal goal = GENERATE(Goal{Slowdown{0.5}}, Goal{LeastMemory{}});
  const Plan plan = make_plan(two_storages(), goal, 0, kOneByteEachMs);
  CHECK(plan.fits);
  CHECK(plan.decisions == std::vector{kKeep, kKeep});
}

TEST_CASE("the least memory without host memory is recomputed") {
  StepRecord record = two_storages();
  record.storages[0].recompute = Recompute::kMemoryBound;
  record.storages[0].recompute_ms = 100;
  const Plan plan = make_plan(record, LeastMemory{}, 0, kOneByteEachMs);
  CHECK(plan.decisions == std::vector{kRecompute, kKeep});
  CHECK(plan.predicted.peak_bytes == 15);
}

TEST_CASE("a plan has room within its limit, and one for a limit that cannot be met within the least") {
  const StepRecord record = two_storages();
  const Plan fits = make_plan(record, DeviceBytes{17}, kUnlimited, kOneByteEachMs);
  REQUIRE(fits.decisions == std::vector{kOffload, kKeep});
  CHECK(fits.schedule.stash.after_save == std::vector<std::uint64_t>{12, 2});
  CHECK(fits.schedule.backward.held_bytes == std::vector<std::uint64_t>{12, 12, 12});
  const Plan over = make_plan(record, DeviceBytes{3}, kUnlimited, kOneByteEachMs);
  REQUIRE(over.predicted.peak_bytes == 15);
  CHECK(over.schedule.backward.held_bytes == std::vector<std::uint64_t>{10, 10, 10});
}

TEST_CASE("a plan of the least memory has room within its peak") {
  const Plan plan = make_plan(two_storages(), LeastMemory{}, kUnlimited, kOneByteEachMs);
  REQUIRE(plan.predicted.peak_bytes == 15);
  CHECK(plan.schedule.backward.held_bytes == std::vector<std::uint64_t>{10, 10, 10});
}

TEST_CASE("a plan for a slowdown has room near its peak") {
  const Plan plan = make_plan(two_storages_and_a_need(), Slowdown{0}, kUnlimited, kOneByteEachMs);
  REQUIRE(plan.predicted.peak_bytes == 15);
  for (const std::uint64_t held_bytes : plan.schedule.backward.held_bytes) {
    CHECK(held_bytes >= 10);
    CHECK(held_bytes <= 11);
  }
}

TEST_CASE("a step without storages has a plan for each goal") {
  StepRecord record;
  record.other = {{0, 50}};
  record.end_ms = 10;
  CHECK(make_plan(record, DeviceBytes{50}, 0, kOneByteEachMs).fits);
  CHECK_FALSE(make_plan(record, DeviceBytes{49}, 0, kOneByteEachMs).fits);
  CHECK(make_plan(record, Slowdown{0.1}, 0, kOneByteEachMs).fits);
  CHECK(make_plan(record, LeastMemory{}, 0, kOneByteEachMs).fits);
}

}  // namespace
}  // namespace ebb
