#include "policy/planner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/predict.h"
#include "test/policy/random_steps.h"

namespace ebb {
namespace {

Best best_of_all(const StepRecord& record, const Limits& limits) {
  const Predictor predictor(record, limits.device_bytes, slow_link());
  const std::size_t count = record.storages.size();
  std::vector<Decision> decisions(count, Decision::kKeep);
  Best best;
  while (true) {
    const Prediction found = predictor.predict(decisions);
    if (found.offloaded_bytes <= limits.host_bytes) {
      best.least_peak = std::min(best.least_peak, found.peak_bytes);
    }
    if (fits(found, limits) && (!best.fits || found.step_ms < best.step_ms)) {
      best.fits = true;
      best.step_ms = found.step_ms;
    }
    std::size_t i = 0;  // counts in base three, without what cannot be
    for (; i < count; ++i) {
      const bool may_recompute = record.storages[i].recompute != Recompute::kNo;
      const Decision last = may_recompute ? Decision::kRecompute : Decision::kOffload;
      if (decisions[i] != last) {
        decisions[i] = static_cast<Decision>(static_cast<int>(decisions[i]) + 1);
        break;
      }
      decisions[i] = Decision::kKeep;
    }
    if (i == count) {
      return best;
    }
  }
}

TEST_CASE("nothing is moved or recomputed where all fits") {
  std::mt19937_64 random(1);
  const StepRecord record = random_step(random, step_of(30));
  const Plan plan = make_plan(record, {}, slow_link());
  CHECK(plan.fits);
  CHECK(std::ranges::count(plan.decisions, Decision::kKeep) == 30);
  CHECK(plan.predicted.step_ms == record.end_ms);
}

TEST_CASE("a plan is near the best of all, and fits wherever one can") {
  const bool still_in_use = GENERATE(false, true);
  std::mt19937_64 random(2);
  int plans = 0;
  int exact = 0;
  double worst = 1;
  for (int i = 0; i < 300; ++i) {
    RandomStep step = step_of(2 + random() % 6);
    step.still_in_use = still_in_use;
    const StepRecord record = random_step(random, step);
    const std::uint64_t total = total_bytes(record);
    Limits limits{.device_bytes = kOtherBytes + random() % (total + 40)};
    if (random() % 3 == 0) {
      limits.host_bytes = random() % (total + 1);
    }
    const Best best = best_of_all(record, limits);
    const Plan plan = make_plan(record, limits, slow_link());
    CAPTURE(i, limits.device_bytes, limits.host_bytes, best.step_ms, best.least_peak);
    CHECK(plan.fits == fits(plan.predicted, limits));
    CHECK(plan.fits == best.fits);
    CHECK(plan.predicted.offloaded_bytes <= limits.host_bytes);
    if (best.fits && plan.fits) {
      const double ratio = plan.predicted.step_ms / best.step_ms;
      CHECK(ratio < 1.10);
      worst = std::max(worst, ratio);
      ++plans;
      exact += ratio == 1 ? 1 : 0;
    }
  }
  CAPTURE(plans, exact, worst);
  CHECK(plans > 100);
  CHECK(exact * 10 > plans * 9);
}

// Has one run make two or three neighbours again, in time and memory that are the whole run's.
void put_together(StepRecord& record, std::mt19937_64& random) {
  for (std::uint32_t first = 0; first + 1 < record.storages.size();) {
    const auto last = static_cast<std::uint32_t>(std::min(first + 1 + random() % 2, record.storages.size() - 1));
    for (std::uint32_t i = first; i <= last; ++i) {
      StorageRecord& storage = record.storages[i];
      storage.recompute = Recompute::kComputeBound;
      storage.recompute_ms = record.storages[first].recompute_ms + 4;
      storage.recompute_bytes = record.storages[first].recompute_bytes;
      storage.other_bytes = kOtherBytes;
      storage.inputs.clear();
      if (first > 0 && first % 2 == 0) {
        storage.inputs.push_back(first - 1);
      }
      storage.made_with = i == last ? first : i + 1;
    }
    first = last + 1;
  }
}

TEST_CASE("a plan for storages that are made together is near the best of all, and drops some of them whole") {
  std::mt19937_64 random(8);
  int whole = 0;
  int in_part = 0;
  for (int i = 0; i < 200; ++i) {
    StepRecord record = random_step(random, step_of(2 + random() % 6));
    put_together(record, random);
    const Limits limits{.device_bytes = kOtherBytes + random() % 100};
    const Best best = best_of_all(record, limits);
    const Plan plan = make_plan(record, limits, slow_link());
    CAPTURE(i, limits.device_bytes, best.step_ms, best.least_peak);
    for (std::uint32_t k = 0; k < record.storages.size(); ++k) {
      int dropped = 0;
      int all = 0;
      for_each_made_with(record, k, [&](std::uint32_t each) {
        ++all;
        dropped += plan.decisions[each] == Decision::kRecompute ? 1 : 0;
      });
      (dropped == all ? whole : in_part) += dropped > 0 ? 1 : 0;
    }
    CHECK(plan.fits == best.fits);
    if (best.fits && plan.fits) {
      CHECK(plan.predicted.step_ms < 1.10 * best.step_ms);
    }
  }
  CHECK(whole > 50);
  CHECK(in_part > 20);
}

TEST_CASE("a plan keeps what only recipes ask for, or moves it, only where one of them runs") {
  std::mt19937_64 random(9);
  int held = 0;
  int left_alone = 0;
  for (int i = 0; i < 200; ++i) {
    StepRecord record = random_step(random, step_of(3 + random() % 5));
    for (std::uint32_t k = 0; k + 1 < record.storages.size(); k += 2) {
      record.storages[k].is_for_recipes = true;
      record.storages[k].recompute = Recompute::kNo;
      record.storages[k + 1].inputs = {k};
    }
    const Limits limits{.device_bytes = kOtherBytes + random() % 60};
    const Best best = best_of_all(record, limits);
    const Plan plan = make_plan(record, limits, slow_link());
    CAPTURE(i, limits.device_bytes, best.step_ms, best.least_peak);
    const std::vector<bool> nowhere = not_held(record, plan.decisions);
    for (std::size_t k = 0; k < nowhere.size(); ++k) {
      CHECK((!nowhere[k] || plan.decisions[k] == Decision::kKeep));
      (nowhere[k] ? left_alone : held) += record.storages[k].is_for_recipes ? 1 : 0;
    }
    CHECK(plan.fits == best.fits);
    if (best.fits && plan.fits) {
      CHECK(plan.predicted.step_ms < 1.10 * best.step_ms);
    }
  }
  CHECK(held > 20);
  CHECK(left_alone > 20);
}

TEST_CASE("a plan's prediction is that of its decisions") {
  std::mt19937_64 random(3);
  const StepRecord record = random_step(random, step_of(40));
  const Limits limits{.device_bytes = kOtherBytes + 150};
  const Plan plan = make_plan(record, limits, slow_link());
  const Prediction again = Predictor(record, limits.device_bytes, slow_link()).predict(plan.decisions);
  CHECK(plan.predicted.step_ms == again.step_ms);
  CHECK(plan.predicted.peak_bytes == again.peak_bytes);
}

TEST_CASE("the same step gives the same plan") {
  std::mt19937_64 random(4);
  const StepRecord record = random_step(random, step_of(60));
  const Limits limits{.device_bytes = kOtherBytes + 200};
  CHECK(make_plan(record, limits, slow_link()).decisions == make_plan(record, limits, slow_link()).decisions);
}

TEST_CASE("more memory makes a step no slower, but for what the search misses") {
  std::mt19937_64 random(5);
  for (int i = 0; i < 20; ++i) {
    const StepRecord record = random_step(random, step_of(12));
    double before = -1;
    for (std::uint64_t bytes = kOtherBytes + 40; bytes < kOtherBytes + 240; bytes += 20) {
      const Plan plan = make_plan(record, {.device_bytes = bytes}, slow_link());
      if (plan.fits && before >= 0) {
        CAPTURE(i, bytes);
        CHECK(plan.predicted.step_ms <= before * 1.05);
      }
      before = plan.fits ? plan.predicted.step_ms : before;
    }
  }
}

TEST_CASE("recipes do not run deeper inside each other than the runtime lets them") {
  StepRecord record;
  constexpr std::uint32_t kCount = 30;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    StorageRecord storage{.bytes = 10, .saved_ms = 1.0 * i, .needed_ms = 100.0 - i, .released_ms = 101.0 - i};
    storage.recompute = Recompute::kMemoryBound;
    if (i > 0) {
      storage.inputs = {i - 1};
    }
    record.storages.push_back(storage);
  }
  record.other = {{0, 0}};
  record.backward_ms = 50;
  record.end_ms = 101;
  const Plan plan = make_plan(record, {.device_bytes = 120, .host_bytes = 0}, slow_link());
  CHECK(plan.fits);
  int depth = 0;
  for (const Decision decision : plan.decisions) {
    depth = decision == Decision::kRecompute ? depth + 1 : 0;
    CHECK(depth <= kMaxRecipeDepth);
  }
}

TEST_CASE("a step without storages has a plan") {
  StepRecord record;
  record.other = {{0, 50}};
  record.end_ms = 10;
  CHECK(make_plan(record, {.device_bytes = 50}, slow_link()).fits);
  const Plan too_large = make_plan(record, {.device_bytes = 49}, slow_link());
  CHECK_FALSE(too_large.fits);
  CHECK(too_large.predicted.peak_bytes == 50);
}

}  // namespace
}  // namespace ebb
