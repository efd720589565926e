#include "policy/planned_policy.h"

#include <memory>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

constexpr LinkRates kOneByteEachMs{.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0};

struct Storage {
  std::uint64_t bytes = 0;
  Recompute recompute = Recompute::kNo;
  std::string operation = "MmBackward0";
};

using Step = std::vector<Storage>;

// Begins a step, and returns what is decided for each of its storages.
std::vector<Decision> decided(PlannedPolicy& policy, const Step& step) {
  policy.begin_step();
  std::vector<Decision> decisions;
  for (const Storage& storage : step) {
    Candidate candidate;
    candidate.bytes = storage.bytes;
    candidate.recompute = storage.recompute;
    candidate.operation = storage.operation;
    decisions.push_back(policy.decide(candidate));
  }
  return decisions;
}

// A step in which copies hide behind compute, and so cost nothing, and recomputing does. `afterwards`: the other memory
// once all storages are released.
StepRecord record_of(const Step& step, std::uint64_t afterwards = 0) {
  StepRecord record;
  double now = 0;
  for (const Storage& storage : step) {
    now += 1000;
    record.storages.push_back(
        {.bytes = storage.bytes, .saved_ms = now, .recompute = storage.recompute, .recompute_ms = 10});
  }
  record.other = {{0, 0}};
  record.backward_ms = now + 1000;
  for (auto storage = record.storages.rbegin(); storage != record.storages.rend(); ++storage) {
    now += 1000;
    storage->needed_ms = now;
    storage->released_ms = now + 1000;
  }
  record.other.push_back({now + 1500, afterwards});
  record.end_ms = now + 2000;
  return record;
}

// Of 1000 bytes, so many that no step is taken to fit whole, though a plan keeps all storages.
constexpr std::uint64_t kNearlyAll = 990;

// Records the step until it is planned.
void teach(PlannedPolicy& policy, const Step& step, std::uint64_t afterwards = 0) {
  for (int i = 0; i < PlannedPolicy::kRecordedSteps; ++i) {
    decided(policy, step);
    REQUIRE(policy.recorded_step());
    policy.learn(*policy.recorded_step(), record_of(step, afterwards));
  }
}

constexpr auto kKeep = Decision::kKeep;
constexpr auto kOffload = Decision::kOffload;
constexpr auto kRecompute = Decision::kRecompute;

const Step kThree{{10}, {20, Recompute::kMemoryBound}, {30}};

PlannedPolicy with_room_for(std::uint64_t bytes) { return {DeviceBytes{bytes}, kUnlimited, kOneByteEachMs, 1}; }

TEST_CASE("a new step takes the least memory, and is recorded") {
  PlannedPolicy policy = with_room_for(1000);
  CHECK(decided(policy, kThree) == std::vector{kOffload, kRecompute, kOffload});
  CHECK(policy.recorded_step() == 1);
  CHECK(policy.plan() == nullptr);
}

TEST_CASE("a region is asked about whatever its bytes, which are not known") {
  PlannedPolicy policy(DeviceBytes{1000}, kUnlimited, kOneByteEachMs, /*least_bytes=*/64);
  policy.begin_step();
  Candidate region;
  region.region = true;
  region.recompute = Recompute::kComputeBound;
  CHECK(policy.decide(region) == kRecompute);
  Candidate small;
  small.bytes = 63;
  CHECK(policy.decide(small) == kKeep);
  StepRecord record;
  record.storages.push_back({.bytes = 100, .movable = false, .recompute = Recompute::kComputeBound});
  policy.learn(*policy.recorded_step(), record);
  policy.begin_step();
  CHECK(policy.decide(region) == kRecompute);
  policy.learn(*policy.recorded_step(), record);
  policy.begin_step();
  CHECK(policy.decide(region) == kKeep);
}

// With 15 bytes the first moves, and compute waits 10 ms for it to come back.
StepRecord tight() {
  StepRecord record;
  record.storages = {{.bytes = 10, .saved_ms = 10, .idle_ms = 10, .needed_ms = 70, .released_ms = 80},
                     {.bytes = 10, .saved_ms = 20, .idle_ms = 20, .needed_ms = 50, .released_ms = 59}};
  record.other = {{0, 5}};
  record.backward_ms = 40;
  record.end_ms = 80;
  return record;
}

std::shared_ptr<const Plan> tight_plan(PlannedPolicy& policy) {
  const Step two{{10}, {10}};
  for (int i = 0; i < PlannedPolicy::kRecordedSteps; ++i) {
    decided(policy, two);
    policy.learn(*policy.recorded_step(), tight());
  }
  decided(policy, two);
  return policy.plan();
}

TEST_CASE("a step that took far longer than its plan says has it made again with slower copies") {
  PlannedPolicy policy = with_room_for(15);
  const std::shared_ptr<const Plan> plan = tight_plan(policy);
  REQUIRE(plan != nullptr);
  REQUIRE(plan->predicted.step_ms == 90);
  policy.correct(plan, {80, 93, 15});
  CHECK(policy.last_plan()->plan == plan);
  policy.correct(plan, {80, 110, 15});
  const PlannedPolicy::Known known = policy.last_plan().value();
  CHECK(known.plan->predicted.step_ms == Approx(110).margin(0.1));
  CHECK(policy.rates(known).out_bytes_per_ms < 0.7);
  CHECK(policy.rates(known).in_bytes_per_ms < 0.7);
  CHECK(known.record.end_ms == 80);
}

TEST_CASE("a step whose compute was slower has its plan made again with the same copies") {
  PlannedPolicy policy = with_room_for(15);
  policy.correct(tight_plan(policy), {160, 172, 15});
  const PlannedPolicy::Known known = policy.last_plan().value();
  CHECK(known.record.end_ms == 160);
  CHECK(known.plan->predicted.step_ms == Approx(170).margin(0.1));
  CHECK(policy.rates(known).in_bytes_per_ms == 1);
}

TEST_CASE("a step that took more memory than its budget has its plan made again for as much less") {
  PlannedPolicy policy = with_room_for(25);
  const std::shared_ptr<const Plan> plan = tight_plan(policy);
  REQUIRE(plan->predicted.kept_bytes == 20);
  policy.correct(plan, {80, 80, 25});
  CHECK(policy.last_plan()->plan == plan);
  policy.correct(plan, {80, 80, 27});
  const PlannedPolicy::Known known = policy.last_plan().value();
  CHECK(known.plan->predicted.kept_bytes == 10);
  CHECK(known.plan->predicted.peak_bytes <= 25);
  CHECK(known.record.other.back().bytes == 7);                            // two of these are what nothing else explains
  policy.correct(known.plan, {80, known.plan->predicted.step_ms, 1000});  // no plan would fit
  CHECK(policy.last_plan()->plan == known.plan);
}

TEST_CASE("a plan that was corrected for its times as often as it may be is still made again for its memory") {
  PlannedPolicy policy = with_room_for(25);
  std::shared_ptr<const Plan> plan = tight_plan(policy);
  for (int i = 0; i < PlannedPolicy::kCorrections; ++i) {
    policy.correct(plan, {80.0 * (i + 2), 80.0 * (i + 2), 25});
    plan = policy.last_plan()->plan;
  }
  policy.correct(plan, {1000, 1000, 25});
  REQUIRE(policy.last_plan()->plan == plan);
  policy.correct(plan, {1000, 1000, 27});
  CHECK(policy.last_plan()->plan != plan);
  CHECK(policy.last_plan()->plan->predicted.kept_bytes == 10);
  CHECK(policy.last_plan()->corrections == PlannedPolicy::kCorrections);
}

TEST_CASE("a plan that offloads more than there was room for is made again for the next step") {
  PlannedPolicy policy = with_room_for(75);
  const Step four{{30}, {20}, {10}, {30}};
  teach(policy, four);
  REQUIRE(decided(policy, four) == std::vector{kOffload, kKeep, kKeep, kKeep});
  const std::shared_ptr<const Plan> first = policy.plan();
  policy.limit_host(30);
  decided(policy, four);
  CHECK(policy.plan() == first);  // has room
  policy.limit_host(20);
  CHECK(policy.plan() == first);  // the present step goes on
  CHECK(decided(policy, four) == std::vector{kKeep, kOffload, kKeep, kKeep});
  policy.limit_host(5);
  CHECK(decided(policy, four) == std::vector{kKeep, kOffload, kKeep, kKeep});  // no plan would fit
  policy.forget_plans();
  teach(policy, four);
  CHECK(decided(policy, four) == std::vector{kOffload, kKeep, kKeep, kKeep});  // within the first limit
}

TEST_CASE("after two records a step follows its plan") {
  PlannedPolicy policy = with_room_for(1000);
  decided(policy, kThree);
  policy.learn(1, record_of(kThree));
  CHECK(decided(policy, kThree) == std::vector{kOffload, kRecompute, kOffload});
  policy.learn(2, record_of(kThree));
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(policy.recorded_step() == std::nullopt);
  REQUIRE(policy.plan() != nullptr);
  CHECK(policy.plan()->predicted.kept_bytes == 60);
}

TEST_CASE("a plan keeps to the budget that the policy was made with") {
  PlannedPolicy policy = with_room_for(50);
  teach(policy, kThree);
  CHECK(decided(policy, kThree) == std::vector{kOffload, kKeep, kKeep});
}

TEST_CASE("a record that comes when the next step has begun is learned from") {
  PlannedPolicy policy = with_room_for(1000);
  decided(policy, kThree);
  decided(policy, kThree);
  policy.learn(1, record_of(kThree));
  decided(policy, kThree);
  policy.learn(2, record_of(kThree));
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a step that strays from its plan takes the least memory from there on, and the next one is recorded") {
  PlannedPolicy policy = with_room_for(1000);
  teach(policy, kThree, kNearlyAll);
  const Storage odd = GENERATE(Storage{21, Recompute::kMemoryBound}, Storage{21},
                               Storage{20, Recompute::kMemoryBound, "SiluBackward0"});
  const Step other{{10}, odd, {30}};
  const Decision safe = odd.recompute == Recompute::kNo ? kOffload : kRecompute;
  CHECK(decided(policy, other) == std::vector{kKeep, safe, kOffload});
  CHECK(policy.plan() == nullptr);
  CHECK(policy.recorded_step() == std::nullopt);
  CHECK(decided(policy, other) == std::vector{kOffload, safe, kOffload});
  CHECK(policy.recorded_step());
}

TEST_CASE("a step longer than its plan strays, and a shorter one does not") {
  PlannedPolicy policy = with_room_for(1000);
  teach(policy, kThree, kNearlyAll);
  CHECK(decided(policy, {{10}, {20, Recompute::kMemoryBound}}) == std::vector{kKeep, kKeep});
  CHECK(decided(policy, {{10}, {20, Recompute::kMemoryBound}, {30}, {40}}) ==
        std::vector{kKeep, kKeep, kKeep, kOffload});
}

TEST_CASE("steps that are never alike are left alone as far as they fit whole") {
  PlannedPolicy policy = with_room_for(100);
  for (std::uint64_t i = 0; i < PlannedPolicy::kRecordedSteps; ++i) {
    const Step step{{10 + i}, {20}};
    CHECK(decided(policy, step) == std::vector{kOffload, kOffload});
    policy.learn(*policy.recorded_step(), record_of(step, /*afterwards=*/40));
  }
  CHECK(decided(policy, {{12}, {20}}) == std::vector{kKeep, kKeep});
  CHECK(policy.recorded_step() == std::nullopt);
  CHECK(decided(policy, {{20}, {20, Recompute::kMemoryBound}, {6}}) == std::vector{kKeep, kKeep, kOffload});
  CHECK(decided(policy, {{12}, {20}}) == std::vector{kOffload, kOffload});
  CHECK(policy.recorded_step());
}

TEST_CASE("steps that are never alike move where what was recorded would not fit whole, and where there is no budget") {
  const Goal goal = GENERATE(Goal(DeviceBytes{69}), Goal(Slowdown{1}), Goal(LeastMemory{}));
  PlannedPolicy policy(goal, kUnlimited, kOneByteEachMs, 1);
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Step step{{10 + i}, {20}};
    CHECK(decided(policy, step) == std::vector{kOffload, kOffload});
    REQUIRE(policy.recorded_step());
    policy.learn(*policy.recorded_step(), record_of(step, /*afterwards=*/40));
  }
}

TEST_CASE("a step that strays and fits whole is left alone, and the next ones follow their plans") {
  PlannedPolicy policy = with_room_for(100);
  teach(policy, kThree);
  CHECK(decided(policy, {{10}, {21}, {30}}) == std::vector{kKeep, kKeep, kKeep});
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(policy.plan() != nullptr);
  CHECK(decided(policy, {{10}, {21}, {70}}) == std::vector{kKeep, kKeep, kOffload});
  CHECK(decided(policy, kThree) == std::vector{kOffload, kRecompute, kOffload});
  CHECK(policy.recorded_step());
}

TEST_CASE("plans are kept side by side") {
  PlannedPolicy policy = with_room_for(70);
  const Step longer{{12}, {20, Recompute::kMemoryBound}, {60}};
  teach(policy, kThree);
  decided(policy, longer);  // strays, so that the next is recorded
  teach(policy, longer);
  const std::vector<Decision> for_longer = decided(policy, longer);
  CHECK(for_longer[0] == kOffload);
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(decided(policy, longer) == for_longer);
  CHECK(policy.recorded_step() == std::nullopt);
}

TEST_CASE("a step that begins like two plans follows the last used one, and then its own") {
  PlannedPolicy policy = with_room_for(1000);
  const Step longer{{10}, {20, Recompute::kMemoryBound}, {60}};
  teach(policy, kThree, kNearlyAll);
  decided(policy, longer);
  teach(policy, longer, kNearlyAll);
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(policy.plan()->decisions.size() == 3);
  CHECK(policy.plan()->predicted.kept_bytes == 60);
}

TEST_CASE("steps that take turns are all planned in the end") {
  PlannedPolicy policy = with_room_for(1000);
  const Step longer{{10}, {20, Recompute::kMemoryBound}, {60}};
  int recorded = 0;
  for (int i = 0; i < 20; ++i) {
    const Step& step = i % 2 == 0 ? kThree : longer;
    decided(policy, step);
    if (const auto number = policy.recorded_step()) {
      policy.learn(*number, record_of(step));
      ++recorded;
    }
  }
  CHECK(recorded < 10);
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(decided(policy, longer) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a step that never comes again is not waited for without end") {
  PlannedPolicy policy = with_room_for(1000);
  teach(policy, kThree, kNearlyAll);
  decided(policy, {{11}});
  int recorded = 0;
  for (int i = 0; i < 20; ++i) {
    decided(policy, kThree);
    recorded += policy.recorded_step() ? 1 : 0;
  }
  CHECK(recorded > 0);
  CHECK(recorded < 10);
}

TEST_CASE("the plan that was not used for longest is forgotten") {
  PlannedPolicy policy = with_room_for(1000);
  for (std::uint64_t i = 0; i <= PlannedPolicy::kMaxPlans; ++i) {
    const Step step{{100 + i}};
    decided(policy, step);
    teach(policy, step, kNearlyAll);
  }
  CHECK(decided(policy, {{101}}) == std::vector{kKeep});
  CHECK(decided(policy, {{100}}) == std::vector{kOffload});
}

TEST_CASE("an evaluation that strays has the next step not recorded") {
  PlannedPolicy policy = with_room_for(1000);
  teach(policy, kThree);
  decided(policy, {{7}});
  policy.drop_step();
  CHECK(decided(policy, kThree) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a record that comes in the middle of a step does not change which plan that follows") {
  PlannedPolicy policy = with_room_for(1000);
  const Step one{{10}, {20}, {30}};
  const Step other{{10}, {20}, {30}, {40}};
  decided(policy, one);
  policy.learn(1, record_of(one));
  decided(policy, one);
  decided(policy, other);
  policy.learn(2, record_of(one));  // planned from here on
  decided(policy, {one[0]});
  REQUIRE(policy.plan() != nullptr);
  policy.learn(3, record_of(other));
  CHECK(policy.plan()->decisions.size() == 3);
  Candidate next;
  next.bytes = 20;
  next.operation = "MmBackward0";
  CHECK(policy.decide(next) == kKeep);
}

TEST_CASE("a step that was dropped follows no plan") {
  PlannedPolicy policy = with_room_for(1000);
  decided(policy, kThree);
  policy.drop_step();
  CHECK(policy.plan() == nullptr);
  CHECK(policy.recorded_step() == std::nullopt);
}

TEST_CASE("records of other steps are ignored") {
  PlannedPolicy policy = with_room_for(1000);
  decided(policy, kThree);
  policy.learn(7, record_of(kThree));
  policy.learn(1, record_of(kThree));
  policy.learn(1, record_of(kThree));  // is over
  decided(policy, kThree);
  policy.learn(2, record_of({{10}}));
  CHECK(decided(policy, kThree) == std::vector{kOffload, kRecompute, kOffload});
}

TEST_CASE("small storages are kept, and are no part of the plan") {
  PlannedPolicy policy(DeviceBytes{1000}, kUnlimited, kOneByteEachMs, 8);
  const Step step{{10}, {7}, {30}};
  CHECK(decided(policy, step) == std::vector{kOffload, kKeep, kOffload});
  CHECK(policy.least_bytes() == 8);
  policy.learn(1, record_of({{10}, {30}}));
  decided(policy, step);
  policy.learn(2, record_of({{10}, {30}}));
  CHECK(decided(policy, step) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("what is planned to be recomputed but cannot be is offloaded") {
  PlannedPolicy policy(DeviceBytes{50}, 0, kOneByteEachMs, 1);  // no host memory, so that it is recomputed
  const Step can{{10, Recompute::kMemoryBound}, {20}, {30}};
  teach(policy, can);
  CHECK(decided(policy, can) == std::vector{kRecompute, kKeep, kKeep});
  CHECK(decided(policy, {{10}, {20}, {30}}) == std::vector{kOffload, kKeep, kKeep});
  CHECK(policy.plan() != nullptr);
  CHECK(policy.recorded_step() == std::nullopt);
}

TEST_CASE("a step that can be recomputed only now and then is recorded as one step") {
  PlannedPolicy policy = with_room_for(1000);
  const Step cannot{{10}, {20}, {30}};
  decided(policy, cannot);
  policy.learn(1, record_of(cannot));
  decided(policy, kThree);
  policy.learn(2, record_of(kThree));
  CHECK(decided(policy, cannot) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("there is no last plan before a step is planned") {
  PlannedPolicy policy = with_room_for(1000);
  CHECK_FALSE(policy.last_plan());
  decided(policy, kThree);
  policy.learn(1, record_of(kThree));
  CHECK_FALSE(policy.last_plan());
}

TEST_CASE("the last plan comes with what it was made from") {
  PlannedPolicy policy = with_room_for(50);
  decided(policy, kThree);
  policy.learn(1, record_of(kThree));
  decided(policy, kThree);
  StepRecord last = record_of(kThree);
  last.end_ms += 7;
  policy.learn(2, last);
  const auto known = policy.last_plan();
  REQUIRE(known);
  CHECK(known->signature == PlannedPolicy::Signature{{10, "MmBackward0"}, {20, "MmBackward0"}, {30, "MmBackward0"}});
  CHECK(known->records == 2);
  CHECK(known->record.end_ms == last.end_ms);
  REQUIRE(known->plan != nullptr);
  CHECK(known->plan->decisions == std::vector{kOffload, kKeep, kKeep});
}

TEST_CASE("the last plan is the one that was made or followed last") {
  PlannedPolicy policy = with_room_for(1000);
  const Step longer{{12}, {20}, {30}, {40}};
  teach(policy, kThree, kNearlyAll);
  decided(policy, longer);  // strays, so that the next is recorded
  teach(policy, longer, kNearlyAll);
  CHECK(policy.last_plan()->signature.size() == 4);
  decided(policy, kThree);
  CHECK(policy.last_plan()->signature.size() == 3);
}

TEST_CASE("a step that is only recorded leaves the last plan as it was") {
  PlannedPolicy policy = with_room_for(1000);
  const Step longer{{12}, {20}, {30}, {40}};
  teach(policy, kThree, kNearlyAll);
  decided(policy, longer);
  decided(policy, longer);
  REQUIRE(policy.recorded_step());
  policy.learn(*policy.recorded_step(), record_of(longer, kNearlyAll));
  REQUIRE(policy.last_plan());
  CHECK(policy.last_plan()->signature.size() == 3);
}

}  // namespace
}  // namespace ebb
