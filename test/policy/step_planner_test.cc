#include "policy/step_planner.h"

#include <memory>
#include <set>
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

using Plans = std::shared_ptr<const Plan>;

// Begins a step, and returns what is decided for each of its storages. `plan`: gets the one that the step then follows.
std::vector<Decision> decided(StepPlanner& planner, const Step& step, Plans* plan = nullptr) {
  planner.begin_step();
  std::vector<Decision> decisions;
  StepPlanner::Answer answer;
  for (const Storage& storage : step) {
    Candidate candidate;
    candidate.bytes = storage.bytes;
    candidate.recompute = storage.recompute;
    candidate.operation = storage.operation;
    answer = planner.decide(candidate);
    decisions.push_back(answer.decision);
  }
  if (plan != nullptr) {
    *plan = answer.plan;
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

// Records the step until it is planned: once, where a step of its structure is known.
void teach(StepPlanner& planner, const Step& step, std::uint64_t afterwards = 0) {
  for (int i = 0; i < StepPlanner::kRecordedSteps; ++i) {
    decided(planner, step);
    if (i > 0 && !planner.recorded_step()) {
      return;
    }
    REQUIRE(planner.recorded_step());
    planner.learn(*planner.recorded_step(), record_of(step, afterwards));
  }
}

constexpr auto kKeep = Decision::kKeep;
constexpr auto kOffload = Decision::kOffload;
constexpr auto kRecompute = Decision::kRecompute;

const Step kThree{{10}, {20, Recompute::kMemoryBound}, {30}};

StepPlanner with_room_for(std::uint64_t bytes) { return {DeviceBytes{bytes}, kUnlimited, kOneByteEachMs, 1}; }

TEST_CASE("a new step takes the least memory, and is recorded") {
  StepPlanner planner = with_room_for(1000);
  Plans plan;
  CHECK(decided(planner, kThree, &plan) == std::vector{kOffload, kRecompute, kOffload});
  CHECK(planner.recorded_step() == 1);
  CHECK(plan == nullptr);
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

std::shared_ptr<const Plan> tight_plan(StepPlanner& planner) {
  const Step two{{10}, {10}};
  for (int i = 0; i < StepPlanner::kRecordedSteps; ++i) {
    decided(planner, two);
    planner.learn(*planner.recorded_step(), tight());
  }
  Plans plan;
  decided(planner, two, &plan);
  return plan;
}

TEST_CASE("a step that took far longer than its plan says has it made again with slower copies") {
  StepPlanner planner = with_room_for(15);
  const std::shared_ptr<const Plan> plan = tight_plan(planner);
  REQUIRE(plan != nullptr);
  REQUIRE(plan->predicted.step_ms == 90);
  planner.correct(plan, 80, {93, 15});
  CHECK(planner.last_plan()->plan == plan);
  planner.correct(plan, 80, {110, 15});
  const StepPlanner::Known known = *planner.last_plan();
  CHECK(known.plan->predicted.step_ms == Approx(110).margin(0.1));
  CHECK(planner.rates(known).out_bytes_per_ms < 0.7);
  CHECK(planner.rates(known).in_bytes_per_ms < 0.7);
  CHECK(known.record.end_ms == 80);
}

TEST_CASE("a step whose compute was slower has its plan made again with the same copies") {
  StepPlanner planner = with_room_for(15);
  planner.correct(tight_plan(planner), 160, {172, 15});
  const StepPlanner::Known known = *planner.last_plan();
  CHECK(known.record.end_ms == 160);
  CHECK(known.plan->predicted.step_ms == Approx(170).margin(0.1));
  CHECK(planner.rates(known).in_bytes_per_ms == 1);
}

TEST_CASE("a step that took more memory than its budget has its plan made again for as much less") {
  StepPlanner planner = with_room_for(25);
  const std::shared_ptr<const Plan> plan = tight_plan(planner);
  REQUIRE(plan->predicted.kept_bytes == 20);
  planner.correct(plan, 80, {80, 25});
  CHECK(planner.last_plan()->plan == plan);
  planner.correct(plan, 80, {80, 27});
  const StepPlanner::Known known = *planner.last_plan();
  CHECK(known.plan->predicted.kept_bytes == 10);
  CHECK(known.plan->predicted.peak_bytes <= 25);
  CHECK(known.record.other.back().bytes == 7);  // two of these are what nothing else explains
  planner.correct(known.plan, 80, {known.plan->predicted.step_ms, 1000});  // no plan would fit
  CHECK(planner.last_plan()->plan == known.plan);
}

TEST_CASE("a plan that was corrected for its times as often as it may be is still made again for its memory") {
  StepPlanner planner = with_room_for(25);
  std::shared_ptr<const Plan> plan = tight_plan(planner);
  for (int i = 0; i < StepPlanner::kCorrections; ++i) {
    planner.correct(plan, 80.0 * (i + 2), {80.0 * (i + 2), 25});
    plan = planner.last_plan()->plan;
  }
  planner.correct(plan, 1000, {1000, 25});
  REQUIRE(planner.last_plan()->plan == plan);
  planner.correct(plan, 1000, {1000, 27});
  CHECK(planner.last_plan()->plan != plan);
  CHECK(planner.last_plan()->plan->predicted.kept_bytes == 10);
  CHECK(planner.last_plan()->correction.of_times == StepPlanner::kCorrections);
}

TEST_CASE("a plan that offloads more than there was room for is made again for the next step") {
  StepPlanner planner = with_room_for(75);
  const Step four{{30}, {20}, {10}, {30}};
  teach(planner, four);
  Plans first;
  REQUIRE(decided(planner, four, &first) == std::vector{kOffload, kKeep, kKeep, kKeep});
  planner.limit_host(30);
  Plans plan;
  decided(planner, four, &plan);
  CHECK(plan == first);  // has room
  planner.limit_host(20);
  CHECK(planner.decide({}).plan == first);  // the present step goes on
  CHECK(decided(planner, four) == std::vector{kKeep, kOffload, kKeep, kKeep});
  planner.limit_host(5);
  CHECK(decided(planner, four) == std::vector{kKeep, kOffload, kKeep, kKeep});  // no plan would fit
  planner.forget_plans();
  teach(planner, four);
  CHECK(decided(planner, four) == std::vector{kOffload, kKeep, kKeep, kKeep});  // within the first limit
}

TEST_CASE("after two records a step follows its plan") {
  StepPlanner planner = with_room_for(1000);
  decided(planner, kThree);
  planner.learn(1, record_of(kThree));
  CHECK(decided(planner, kThree) == std::vector{kOffload, kRecompute, kOffload});
  planner.learn(2, record_of(kThree));
  Plans plan;
  CHECK(decided(planner, kThree, &plan) == std::vector{kKeep, kKeep, kKeep});
  CHECK(planner.recorded_step() == std::nullopt);
  REQUIRE(plan != nullptr);
  CHECK(plan->predicted.kept_bytes == 60);
}

TEST_CASE("a plan keeps to the budget that the policy was made with") {
  StepPlanner planner = with_room_for(50);
  teach(planner, kThree);
  CHECK(decided(planner, kThree) == std::vector{kOffload, kKeep, kKeep});
}

TEST_CASE("a record that comes when the next step has begun is learned from") {
  StepPlanner planner = with_room_for(1000);
  decided(planner, kThree);
  decided(planner, kThree);
  planner.learn(1, record_of(kThree));
  decided(planner, kThree);
  planner.learn(2, record_of(kThree));
  CHECK(decided(planner, kThree) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a step that strays from its plan takes the least memory from there on, and the next one is recorded") {
  StepPlanner planner = with_room_for(1000);
  teach(planner, kThree, kNearlyAll);
  const Storage odd = GENERATE(Storage{21, Recompute::kMemoryBound}, Storage{21},
                               Storage{20, Recompute::kMemoryBound, "SiluBackward0"});
  const Step other{{10}, odd, {30}};
  const Decision safe = odd.recompute == Recompute::kNo ? kOffload : kRecompute;
  Plans plan;
  CHECK(decided(planner, other, &plan) == std::vector{kKeep, safe, kOffload});
  CHECK(plan == nullptr);
  CHECK(planner.recorded_step() == std::nullopt);
  CHECK(decided(planner, other) == std::vector{kOffload, safe, kOffload});
  CHECK(planner.recorded_step());
}

TEST_CASE("a step longer than its plan strays, and a shorter one does not") {
  StepPlanner planner = with_room_for(1000);
  teach(planner, kThree, kNearlyAll);
  CHECK(decided(planner, {{10}, {20, Recompute::kMemoryBound}}) == std::vector{kKeep, kKeep});
  CHECK(decided(planner, {{10}, {20, Recompute::kMemoryBound}, {30}, {40}}) ==
        std::vector{kKeep, kKeep, kKeep, kOffload});
}

TEST_CASE("steps that are never alike are left alone as far as they fit whole") {
  StepPlanner planner = with_room_for(100);
  for (std::uint64_t i = 0; i < StepPlanner::kRecordedSteps; ++i) {
    const Step step{{10 + i}, {20}};
    CHECK(decided(planner, step) == std::vector{kOffload, kOffload});
    planner.learn(*planner.recorded_step(), record_of(step, /*afterwards=*/40));
  }
  CHECK(decided(planner, {{12}, {20}}) == std::vector{kKeep, kKeep});
  CHECK(planner.recorded_step() == std::nullopt);
  CHECK(decided(planner, {{20}, {20, Recompute::kMemoryBound}, {6}}) == std::vector{kKeep, kKeep, kOffload});
  CHECK(decided(planner, {{12}, {20}}) == std::vector{kOffload, kOffload});
  CHECK(planner.recorded_step());
}

TEST_CASE("steps that are never alike move where what was recorded would not fit whole, and where there is no budget") {
  const Goal goal = GENERATE(Goal(DeviceBytes{69}), Goal(Slowdown{1}), Goal(LeastMemory{}));
  StepPlanner planner(goal, kUnlimited, kOneByteEachMs, 1);
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Step step{{10 + i}, {20, Recompute::kNo, std::to_string(i)}};
    CHECK(decided(planner, step) == std::vector{kOffload, kOffload});
    REQUIRE(planner.recorded_step());
    planner.learn(*planner.recorded_step(), record_of(step, /*afterwards=*/40));
  }
}

TEST_CASE("a step that strays and fits whole is left alone, and the next ones follow their plans") {
  StepPlanner planner = with_room_for(100);
  teach(planner, kThree);
  CHECK(decided(planner, {{10}, {21}, {30}}) == std::vector{kKeep, kKeep, kKeep});
  Plans plan;
  CHECK(decided(planner, kThree, &plan) == std::vector{kKeep, kKeep, kKeep});
  CHECK(plan != nullptr);
  CHECK(decided(planner, {{10}, {21}, {70}}) == std::vector{kKeep, kKeep, kOffload});
  CHECK(decided(planner, kThree) == std::vector{kOffload, kRecompute, kOffload});
  CHECK(planner.recorded_step());
}

// A step over so many tokens, which the first storage tells: one has the same bytes in each step, the others grow with
// the tokens or their square.
Step over(std::uint64_t tokens) {
  return {{tokens, Recompute::kMemoryBound}, {100}, {2 * tokens - 1}, {tokens * tokens, Recompute::kComputeBound}};
}

void record(StepPlanner& planner, const Step& step, std::uint64_t afterwards = kNearlyAll) {
  decided(planner, step);
  REQUIRE(planner.recorded_step());
  planner.learn(*planner.recorded_step(), record_of(step, afterwards));
}

StepPlanner taught_sizes(std::uint64_t budget) {
  StepPlanner planner = with_room_for(budget);
  for (const std::uint64_t tokens : {11, 10, 20}) {
    record(planner, over(tokens), budget - 10);
  }
  return planner;
}

TEST_CASE("once two sizes are known, steps of other sizes follow plans of their own") {
  StepPlanner planner = taught_sizes(1000);
  const std::uint64_t tokens = GENERATE(5, 9, 12, 15, 19, 25);
  Plans plan;
  CHECK(decided(planner, over(tokens), &plan) == std::vector(4, kKeep));
  CHECK(planner.recorded_step() == std::nullopt);
  REQUIRE(plan != nullptr);
  CHECK(plan->predicted.kept_bytes == 100 + tokens + 2 * tokens - 1 + tokens * tokens);
}

// Begins a step and gives it its first storage.
bool rests(StepPlanner& planner, const Candidate& first) {
  planner.begin_step();
  return planner.rests(first);
}

constexpr Candidate kTen{.bytes = 10, .operation = "MmBackward0"};

TEST_CASE("a step rests whose plan keeps everything, once one was measured and kept to the budget") {
  StepPlanner planner = with_room_for(25);
  const std::shared_ptr<const Plan> plan = tight_plan(planner);
  CHECK_FALSE(rests(planner, kTen));
  planner.correct(plan, 80, {80, 27});
  CHECK_FALSE(rests(planner, kTen));  // the plan that was made for that moves one
  StepPlanner other = with_room_for(25);
  other.correct(tight_plan(other), 80, {80, 25});
  CHECK(rests(other, kTen));
  CHECK(other.rests(kTen));
  CHECK_FALSE(rests(other, {.bytes = 12, .operation = "MmBackward0"}));
  CHECK_FALSE(rests(other, {.bytes = 10, .operation = "AddmmBackward0"}));
  CHECK(rests(other, kTen));
  other.correct(other.last_plan()->plan, 80, {80, 1000});  // no plan would fit
  CHECK_FALSE(rests(other, kTen));
  other.correct(other.last_plan()->plan, 80, {80, 25});
  CHECK(rests(other, kTen));
  other.forget_plans();
  CHECK_FALSE(other.rests(kTen));
}

TEST_CASE("a step strays from rest where it saves something else, and is planned beside the other") {
  StepPlanner planner = with_room_for(25);
  planner.correct(tight_plan(planner), 80, {80, 25});
  const Step other{{10}, {17, Recompute::kNo, "SinBackward0"}, {10}};
  REQUIRE(rests(planner, kTen));
  CHECK_FALSE(planner.rests({.bytes = 17, .operation = "SinBackward0"}));
  CHECK(planner.decide({.bytes = 17, .operation = "SinBackward0"}).decision == kOffload);
  CHECK_FALSE(planner.rests(kTen));
  CHECK_FALSE(rests(planner, kTen));  // such a step may come again
  CHECK(decided(planner, other) == std::vector{kKeep, kOffload, kOffload});
  teach(planner, other);
  Plans plan;
  decided(planner, other, &plan);
  CHECK(plan != nullptr);
  CHECK_FALSE(rests(planner, kTen));  // of two plans, one moves
}

TEST_CASE("steps rest again, long after one has strayed from rest") {
  StepPlanner planner = with_room_for(25);
  planner.correct(tight_plan(planner), 80, {80, 25});
  REQUIRE(rests(planner, kTen));
  REQUIRE(planner.rests(kTen));
  CHECK_FALSE(planner.rests(kTen));
  static_cast<void>(planner.decide(kTen));
  int steps = 0;
  while (!rests(planner, kTen)) {
    static_cast<void>(planner.decide(kTen));
    REQUIRE(++steps < 1000);
  }
  CHECK(steps > 8);
}

TEST_CASE("a step of a size that was never recorded rests, too") {
  StepPlanner planner = taught_sizes(1000);
  Plans plan;
  decided(planner, over(15), &plan);
  REQUIRE(plan != nullptr);
  CHECK_FALSE(rests(planner, {.bytes = 15, .operation = "MmBackward0"}));
  planner.correct(plan, planner.last_plan()->record.end_ms, {plan->predicted.step_ms, plan->predicted.peak_bytes});
  CHECK(rests(planner, {.bytes = 15, .operation = "MmBackward0"}));
  decided(planner, over(19));
  CHECK(rests(planner, {.bytes = 19, .operation = "MmBackward0"}));
  decided(planner, {{40}, {50}});
  record(planner, over(40), 990);  // which tells more of the structure
  constexpr int kLongAfter = 20;
  for (int i = 0; i < kLongAfter; ++i) {
    decided(planner, over(19));
  }
  CHECK_FALSE(rests(planner, {.bytes = 19, .operation = "MmBackward0"}));
}

TEST_CASE("at rest a step need not save what recipes begin from, or may save it later") {
  StepPlanner planner = with_room_for(1000);
  const Step step{{.bytes = 5, .operation = std::string(StepPlanner::kNotSaved)}, {10}, {20}};
  teach(planner, step);
  Plans plan;
  decided(planner, step, &plan);
  REQUIRE(plan != nullptr);
  planner.correct(plan, planner.last_plan()->record.end_ms, {plan->predicted.step_ms, plan->predicted.peak_bytes});
  decided(planner, step);
  planner.saved_later(0);
  const Candidate value{.bytes = 5, .operation = "MmBackward0"};
  const Candidate twenty{.bytes = 20, .operation = "MmBackward0"};
  CHECK_FALSE(rests(planner, value));
  REQUIRE(rests(planner, kTen));
  CHECK(planner.rests(value));
  CHECK(planner.rests(twenty));
  CHECK_FALSE(planner.rests(value));
}

TEST_CASE("a step that is left alone rests as long as it fits whole") {
  StepPlanner planner = with_room_for(100);
  for (std::uint64_t i = 0; i < StepPlanner::kRecordedSteps; ++i) {
    CHECK_FALSE(rests(planner, kTen));
    decided(planner, {{10 + i}, {20}});
    planner.learn(*planner.recorded_step(), record_of({{10 + i}, {20}}, /*afterwards=*/40));
  }
  REQUIRE(rests(planner, kTen));
  CHECK(planner.rests(kTen));
  CHECK(planner.rests({.bytes = 15, .operation = "SinBackward0"}));
  CHECK_FALSE(planner.rests({.bytes = 20, .operation = "SinBackward0"}));
  CHECK(planner.decide({.bytes = 20, .operation = "SinBackward0"}).decision == kOffload);
  CHECK_FALSE(rests(planner, kTen));
  CHECK(planner.recorded_step());
}

TEST_CASE("at rest a step may not save more than the plan has, whatever recipes begin from") {
  StepPlanner planner = with_room_for(1000);
  const Step step{{.bytes = 10, .operation = std::string(StepPlanner::kNotSaved)}, {10}};
  teach(planner, step);
  Plans plan;
  decided(planner, step, &plan);
  REQUIRE(plan != nullptr);
  planner.correct(plan, planner.last_plan()->record.end_ms, {plan->predicted.step_ms, plan->predicted.peak_bytes});
  REQUIRE(rests(planner, kTen));
  CHECK_FALSE(planner.rests(kTen));
}

TEST_CASE("steps of two structures that begin alike do not rest") {
  StepPlanner planner = with_room_for(1000);
  for (const Step& step : {Step{{10}, {20}}, Step{{10}, {30, Recompute::kNo, "SinBackward0"}}}) {
    if (planner.last_plan() != nullptr) {
      decided(planner, step);  // which strays
    }
    teach(planner, step, kNearlyAll);
    Plans plan;
    CHECK(decided(planner, step, &plan) == std::vector(2, kKeep));
    REQUIRE(plan != nullptr);
    planner.correct(plan, planner.last_plan()->record.end_ms, {plan->predicted.step_ms, plan->predicted.peak_bytes});
  }
  constexpr int kLongAfter = 20;
  for (int i = 0; i < kLongAfter; ++i) {
    decided(planner, {{10}, {20}});
    CHECK_FALSE(rests(planner, kTen));
    decided(planner, {{10}, {30, Recompute::kNo, "SinBackward0"}});
  }
}

TEST_CASE("a step that is to be recorded does not rest") {
  StepPlanner planner = with_room_for(25);
  planner.correct(tight_plan(planner), 80, {80, 25});
  decided(planner, {{10}, {17, Recompute::kNo, "SinBackward0"}});  // it strays
  CHECK_FALSE(rests(planner, kTen));
}

TEST_CASE("nothing is learned of a step that looks for no recipes") {
  StepPlanner planner = with_room_for(1000);
  planner.begin_step();
  REQUIRE(planner.recorded_step());
  CHECK_FALSE(planner.rests(kTen));
  planner.looks_for_no_recipes();
  CHECK(planner.recorded_step() == std::nullopt);
  static_cast<void>(planner.decide(kTen));
  planner.begin_step();
  CHECK(planner.recorded_step());
}

TEST_CASE("steps of one structure have one number, and others have another") {
  StepPlanner planner = taught_sizes(1000);
  const auto structure = [&](const Storage& first, const Storage& second) {
    planner.begin_step();
    StepPlanner::Answer answer;
    for (const Storage& each : {first, second}) {
      Candidate candidate;
      candidate.bytes = each.bytes;
      candidate.operation = each.operation;
      answer = planner.decide(candidate);
    }
    return answer.structure;
  };
  CHECK(structure({13}, {100}) == structure({20}, {100}));
  CHECK(structure({13}, {100}) != 0);
  CHECK(structure({13}, {50}) == 0);
}

TEST_CASE("a plan for a size serves sizes that are hardly smaller") {
  StepPlanner planner = with_room_for(100'000);
  for (const std::uint64_t tokens : {1000, 1100, 2000}) {
    record(planner, {{tokens}, {10 * tokens}}, 99'000);
  }
  Plans plan;
  Plans other;
  decided(planner, {{1501}, {15010}}, &plan);
  REQUIRE(plan != nullptr);
  CHECK(plan->predicted.kept_bytes == 11 * 1504);
  decided(planner, {{1504}, {15040}}, &other);
  CHECK(other == plan);
  decided(planner, {{1505}, {15050}}, &other);
  CHECK(other != plan);
  CHECK(other->predicted.kept_bytes == 11 * 1536);
  decided(planner, {{2000}, {20000}}, &other);
  CHECK(other->predicted.kept_bytes == 22'000);  // recorded
}

TEST_CASE("a plan for another size keeps to the budget") {
  StepPlanner planner = taught_sizes(700);
  Plans plan;
  decided(planner, over(25), &plan);  // 799 bytes
  REQUIRE(plan != nullptr);
  CHECK(plan->fits);
  CHECK(plan->predicted.peak_bytes <= 700);
  CHECK(plan->predicted.kept_bytes < 700);
}

TEST_CASE("the first recorded step tells nothing of sizes") {
  StepPlanner planner = with_room_for(1000);
  record(planner, over(10));
  record(planner, over(20));
  Plans plan;
  decided(planner, over(15), &plan);
  CHECK(plan == nullptr);
  CHECK(planner.recorded_step());
}

TEST_CASE("a size far from those that are known has its step recorded") {
  StepPlanner planner = taught_sizes(1000);
  const std::uint64_t tokens = GENERATE(4, 26);
  Plans plan;
  decided(planner, over(tokens), &plan);
  CHECK(plan == nullptr);
  record(planner, over(tokens));
  decided(planner, over(tokens + 1), &plan);
  CHECK(plan != nullptr);
}

TEST_CASE("a step strays that does not grow as its structure does, but for some padding") {
  StepPlanner planner = taught_sizes(1000);
  Plans plan;
  decided(planner, over(15), &plan);
  const Plans of_15 = plan;
  decided(planner, over(16), &plan);  // near to 15, and yet another size
  CHECK(plan != nullptr);
  CHECK(plan != of_15);
  Step odd = over(15);
  odd[3].bytes += 10;  // padded
  CHECK(decided(planner, odd, &plan).back() == kKeep);
  CHECK(plan != nullptr);
  odd[3].bytes += 10;
  CHECK(decided(planner, odd, &plan).back() != kKeep);
  CHECK(plan == nullptr);
}

TEST_CASE("what is found out about one size holds for the others") {
  StepPlanner planner = taught_sizes(1000);
  Plans before;
  decided(planner, over(15), &before);
  REQUIRE(before != nullptr);
  Plans corrected;
  decided(planner, over(16), &corrected);
  planner.begin_step();
  CHECK(planner.correct(corrected, 2 * corrected->predicted.step_ms, {2 * corrected->predicted.step_ms, 0}));
  Plans after;
  decided(planner, over(15), &after);
  REQUIRE(after != nullptr);
  CHECK(after->predicted.step_ms == Approx(2 * before->predicted.step_ms));
  decided(planner, over(20), &after);
  CHECK(after->predicted.step_ms > 1.9 * corrected->predicted.step_ms);
}

TEST_CASE("both of two recorded sizes have plans, and a stray between them changes nothing") {
  StepPlanner planner = taught_sizes(1000);
  Plans of_10;
  Plans of_20;
  decided(planner, over(10), &of_10);
  decided(planner, over(20), &of_20);
  REQUIRE(of_10 != nullptr);
  REQUIRE(of_20 != nullptr);
  decided(planner, {{15}, {7}});
  for (const std::uint64_t tokens : {10, 20, 15, 10, 12, 10, 20, 10, 20, 10}) {
    decided(planner, over(tokens));
    if (planner.recorded_step()) {
      planner.learn(*planner.recorded_step(), record_of(over(tokens), kNearlyAll));
    }
  }
  Plans plan;
  decided(planner, over(17), &plan);
  CHECK(plan != nullptr);
}

TEST_CASE("a size that is recorded after a correction is corrected, too, and once") {
  StepPlanner planner = taught_sizes(1000);
  Plans plan;
  decided(planner, over(20), &plan);
  REQUIRE(plan != nullptr);
  const double before_ms = plan->predicted.step_ms;
  planner.begin_step();
  REQUIRE(planner.correct(plan, 3 * before_ms, {3 * before_ms, 0}));
  decided(planner, over(40));
  record(planner, over(40));
  decided(planner, over(40), &plan);
  REQUIRE(plan != nullptr);
  CHECK(planner.last_plan()->record.end_ms == Approx(3 * record_of(over(40)).end_ms));
  decided(planner, over(20), &plan);
  CHECK(plan->predicted.step_ms == Approx(3 * before_ms));
}

TEST_CASE("a step whose storages are larger than is expected strays before the budget is exceeded") {
  StepPlanner planner = with_room_for(100'000);
  for (const std::uint64_t tokens : {3000, 3100, 4000}) {
    record(planner, {{tokens}, {10 * tokens}, {10 * tokens}}, 99'000);
  }
  Plans plan;
  decided(planner, {{4600}, {46'000}, {46'000}}, &plan);
  REQUIRE(plan != nullptr);
  const auto last_rests = [&](std::uint64_t bytes) {
    planner.begin_step();
    return planner.rests({.bytes = 4600, .operation = "MmBackward0"}) &&
           planner.rests({.bytes = bytes, .operation = "MmBackward0"}) &&
           planner.rests({.bytes = bytes, .operation = "MmBackward0"});
  };
  planner.correct(plan, planner.last_plan()->record.end_ms, {plan->predicted.step_ms, plan->predicted.peak_bytes});
  CHECK(last_rests(46'000));
  CHECK_FALSE(last_rests(48'000));
  decided(planner, {{4600}, {48'000}, {48'000}}, &plan);
  CHECK(plan == nullptr);
}

TEST_CASE("a size for which no plan fits has its step recorded") {
  StepPlanner planner = with_room_for(500);
  for (const std::uint64_t tokens : {11, 10, 20}) {
    record(planner, {{tokens}, {20 * tokens}}, 490);
  }
  Plans plan;
  decided(planner, {{25}, {501}}, &plan);
  CHECK(plan == nullptr);
}

TEST_CASE("plans for many sizes do not push out what they are made from") {
  StepPlanner planner = with_room_for(1000);
  for (const std::uint64_t tokens : {110, 100, 200}) {
    record(planner, {{tokens}, {100}});
  }
  std::set<Plans> plans;
  for (int i = 0; i < 2; ++i) {
    for (std::uint64_t tokens = 50; tokens <= 250; ++tokens) {
      Plans plan;
      decided(planner, {{tokens}, {100}}, &plan);
      REQUIRE(plan != nullptr);
      plans.insert(plan);
    }
  }
  CHECK(plans.size() > StepPlanner::kMaxPlans);
}

TEST_CASE("plans are kept side by side") {
  StepPlanner planner = with_room_for(70);
  const Step longer{{12}, {20, Recompute::kMemoryBound}, {60}};
  teach(planner, kThree);
  decided(planner, longer);  // strays, so that the next is recorded
  teach(planner, longer);
  const std::vector<Decision> for_longer = decided(planner, longer);
  CHECK(for_longer[0] == kOffload);
  CHECK(decided(planner, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(decided(planner, longer) == for_longer);
  CHECK(planner.recorded_step() == std::nullopt);
}

TEST_CASE("a step that begins like two plans follows the last used one, and then its own") {
  StepPlanner planner = with_room_for(1000);
  const Step longer{{10}, {20, Recompute::kMemoryBound}, {60}};
  teach(planner, kThree, kNearlyAll);
  decided(planner, longer);
  teach(planner, longer, kNearlyAll);
  Plans plan;
  CHECK(decided(planner, kThree, &plan) == std::vector{kKeep, kKeep, kKeep});
  CHECK(plan->decisions.size() == 3);
  CHECK(plan->predicted.kept_bytes == 60);
}

TEST_CASE("steps that take turns are all planned in the end") {
  StepPlanner planner = with_room_for(1000);
  const Step longer{{10}, {20, Recompute::kMemoryBound}, {60}};
  int recorded = 0;
  for (int i = 0; i < 20; ++i) {
    const Step& step = i % 2 == 0 ? kThree : longer;
    decided(planner, step);
    if (const auto number = planner.recorded_step()) {
      planner.learn(*number, record_of(step));
      ++recorded;
    }
  }
  CHECK(recorded < 10);
  CHECK(decided(planner, kThree) == std::vector{kKeep, kKeep, kKeep});
  CHECK(decided(planner, longer) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a step that never comes again is not waited for without end") {
  StepPlanner planner = with_room_for(1000);
  teach(planner, kThree, kNearlyAll);
  const bool is_told_by_first = GENERATE(false, true);
  decided(planner, is_told_by_first ? Step{{11}} : Step{{10}, {99}});
  int recorded = 0;
  for (int i = 0; i < 20; ++i) {
    decided(planner, kThree);
    recorded += planner.recorded_step() ? 1 : 0;
  }
  CHECK((recorded == 0) == is_told_by_first);
  CHECK(recorded < 10);
}

// Returns how many steps were recorded.
int run(StepPlanner& planner, const std::vector<Step>& steps) {
  int recorded = 0;
  for (const Step& step : steps) {
    decided(planner, step);
    if (const auto number = planner.recorded_step()) {
      planner.learn(*number, record_of(step));
      ++recorded;
    }
  }
  return recorded;
}

TEST_CASE("a step that does not fit whole is planned, though steps between do") {
  StepPlanner planner = with_room_for(150);
  const Step small{{10}, {10}};
  const Step large{{100, Recompute::kMemoryBound}, {100}};
  CHECK(run(planner, {small, small, small, large, small, large, small, large, small}) ==
        StepPlanner::kRecordedSteps + 1);
  for (const Step& step : {large, small, large}) {
    Plans plan;
    decided(planner, step, &plan);
    CHECK(plan != nullptr);
    CHECK_FALSE(planner.recorded_step());
  }
}

TEST_CASE("steps whose sizes hardly differ are planned after one more record than equal ones") {
  StepPlanner planner = with_room_for(2500);
  const auto step = [](std::uint64_t size) { return Step{{size, Recompute::kMemoryBound}, {size}, {size}, {size}}; };
  CHECK(run(planner, {step(980), step(990), step(970)}) == 3);
  Plans plan;
  decided(planner, step(950), &plan);
  CHECK(plan != nullptr);
}

TEST_CASE("a plan serves steps that are a little smaller, and not those that are much smaller or larger") {
  StepPlanner planner = with_room_for(1500);
  const auto step = [](std::uint64_t size) { return Step{{size, Recompute::kMemoryBound}, {size}}; };
  run(planner, {step(1000), step(1000)});
  Plans plan;
  for (const std::uint64_t size : {930, 999, 905, 1000, 960}) {
    CAPTURE(size);
    decided(planner, step(size), &plan);
    CHECK(plan != nullptr);
    CHECK_FALSE(planner.recorded_step());
  }
  decided(planner, {{930, Recompute::kMemoryBound}, {931}}, &plan);
  CHECK(plan != nullptr);
  decided(planner, GENERATE(Step{{890, Recompute::kMemoryBound}, {890}}, Step{{1010, Recompute::kMemoryBound}, {1010}}),
          &plan);
  CHECK(plan == nullptr);
}

TEST_CASE("the plan that was not used for longest is forgotten") {
  StepPlanner planner = with_room_for(1000);
  const auto step = [](std::size_t i) { return Step{{100, Recompute::kNo, std::to_string(i)}}; };
  for (std::size_t i = 0; i <= StepPlanner::kMaxPlans; ++i) {
    decided(planner, step(i));
    teach(planner, step(i), kNearlyAll);
  }
  CHECK(decided(planner, step(1)) == std::vector{kKeep});
  CHECK(decided(planner, step(0)) == std::vector{kOffload});
}

TEST_CASE("an evaluation that strays has the next step not recorded") {
  StepPlanner planner = with_room_for(1000);
  teach(planner, kThree);
  decided(planner, {{7}});
  planner.drop_step();
  CHECK(decided(planner, kThree) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("a record that comes in the middle of a step does not change which plan that follows") {
  StepPlanner planner = with_room_for(1000);
  const Step one{{10}, {20}, {30}};
  const Step other{{10}, {20}, {30}, {40}};
  decided(planner, one);
  planner.learn(1, record_of(one));
  decided(planner, one);
  decided(planner, other);
  planner.learn(2, record_of(one));  // planned from here on
  Plans plan;
  decided(planner, {one[0]}, &plan);
  REQUIRE(plan != nullptr);
  planner.learn(3, record_of(other));
  Candidate next;
  next.bytes = 20;
  next.operation = "MmBackward0";
  const StepPlanner::Answer answer = planner.decide(next);
  CHECK(answer.decision == kKeep);
  CHECK(answer.plan == plan);
  CHECK(plan->decisions.size() == 3);
}

TEST_CASE("a step that was dropped follows no plan") {
  StepPlanner planner = with_room_for(1000);
  decided(planner, kThree);
  planner.drop_step();
  CHECK(planner.decide({}).plan == nullptr);
  CHECK(planner.recorded_step() == std::nullopt);
}

TEST_CASE("records of other steps are ignored") {
  StepPlanner planner = with_room_for(1000);
  decided(planner, kThree);
  planner.learn(7, record_of(kThree));
  planner.learn(1, record_of(kThree));
  planner.learn(1, record_of(kThree));  // is over
  decided(planner, kThree);
  planner.learn(2, record_of({{10}}));
  CHECK(decided(planner, kThree) == std::vector{kOffload, kRecompute, kOffload});
}

TEST_CASE("small storages are kept, and are no part of the plan") {
  StepPlanner planner(DeviceBytes{1000}, kUnlimited, kOneByteEachMs, 8);
  const Step step{{10}, {7}, {30}};
  CHECK(decided(planner, step) == std::vector{kOffload, kKeep, kOffload});
  CHECK(planner.least_bytes() == 8);
  planner.learn(1, record_of({{10}, {30}}));
  decided(planner, step);
  planner.learn(2, record_of({{10}, {30}}));
  CHECK(decided(planner, step) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("what is planned to be recomputed but cannot be is offloaded") {
  StepPlanner planner(DeviceBytes{50}, 0, kOneByteEachMs, 1);  // no host memory, so that it is recomputed
  const Step can{{10, Recompute::kMemoryBound}, {20}, {30}};
  teach(planner, can);
  CHECK(decided(planner, can) == std::vector{kRecompute, kKeep, kKeep});
  Plans plan;
  CHECK(decided(planner, {{10}, {20}, {30}}, &plan) == std::vector{kOffload, kKeep, kKeep});
  CHECK(plan != nullptr);
  CHECK(planner.recorded_step() == std::nullopt);
}

TEST_CASE("a step that can be recomputed only now and then is recorded as one step") {
  StepPlanner planner = with_room_for(1000);
  const Step cannot{{10}, {20}, {30}};
  decided(planner, cannot);
  planner.learn(1, record_of(cannot));
  decided(planner, kThree);
  planner.learn(2, record_of(kThree));
  CHECK(decided(planner, cannot) == std::vector{kKeep, kKeep, kKeep});
}

TEST_CASE("there is no last plan before a step is planned") {
  StepPlanner planner = with_room_for(1000);
  CHECK_FALSE(planner.last_plan());
  decided(planner, kThree);
  planner.learn(1, record_of(kThree));
  CHECK_FALSE(planner.last_plan());
}

TEST_CASE("the last plan comes with what it was made from") {
  StepPlanner planner = with_room_for(50);
  decided(planner, kThree);
  planner.learn(1, record_of(kThree));
  decided(planner, kThree);
  StepRecord last = record_of(kThree);
  last.end_ms += 7;
  planner.learn(2, last);
  const auto known = planner.last_plan();
  REQUIRE(known);
  CHECK(known->signature == StepPlanner::Signature{{10, "MmBackward0"}, {20, "MmBackward0"}, {30, "MmBackward0"}});
  CHECK(known->records == 2);
  CHECK(known->record.end_ms == last.end_ms);
  REQUIRE(known->plan != nullptr);
  CHECK(known->plan->decisions == std::vector{kOffload, kKeep, kKeep});
}

TEST_CASE("the last plan is the one that was made or followed last") {
  StepPlanner planner = with_room_for(1000);
  const Step longer{{12}, {20}, {30}, {40}};
  teach(planner, kThree, kNearlyAll);
  decided(planner, longer);  // strays, so that the next is recorded
  teach(planner, longer, kNearlyAll);
  CHECK(planner.last_plan()->signature.size() == 4);
  decided(planner, kThree);
  CHECK(planner.last_plan()->signature.size() == 3);
}

TEST_CASE("a step that is only recorded leaves the last plan as it was") {
  StepPlanner planner = with_room_for(1000);
  const Step longer{{12}, {20}, {30}, {40}};
  teach(planner, kThree, kNearlyAll);
  decided(planner, longer);
  decided(planner, longer);
  REQUIRE(planner.recorded_step());
  planner.learn(*planner.recorded_step(), record_of(longer, kNearlyAll));
  REQUIRE(planner.last_plan());
  CHECK(planner.last_plan()->signature.size() == 3);
}

}  // namespace
}  // namespace ebb
