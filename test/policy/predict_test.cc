#include "policy/predict.h"

#include <vector>

#include <catch2/catch.hpp>

#include "test/policy/two_storages.h"

namespace ebb {
namespace {

constexpr LinkRates kOneByteEachMs{.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0};

constexpr Decision kKeep = Decision::kKeep;
constexpr Decision kOffload = Decision::kOffload;
constexpr Decision kRecompute = Decision::kRecompute;

Prediction predicted(const StepRecord& record, const std::vector<Decision>& decisions,
                     std::uint64_t device_bytes = kUnlimited) {
  return Predictor(record, device_bytes, kOneByteEachMs).predict(decisions);
}

TEST_CASE("what is kept costs memory until it is released, and no time") {
  const Prediction found = predicted(two_storages(), {kKeep, kKeep});
  CHECK(found.step_ms == 80);
  CHECK(found.peak_bytes == 25);
  CHECK(found.kept_bytes == 20);
}

TEST_CASE("a copy out holds its storage until it is done, and hides behind compute") {
  StepRecord record = two_storages_and_a_need();
  const Prediction found = predicted(record, {kOffload, kKeep, kKeep}, 15);
  CHECK(found.step_ms == 80);
  CHECK(found.stalled_ms == 0);
  CHECK(found.peak_bytes == 15);  // the first is away when the second is saved
  CHECK(found.offloaded_bytes == 10);

  record.storages[1].saved_ms = 19;
  CHECK(predicted(record, {kOffload, kKeep, kKeep}, 15).stalled_ms == 1);
}

TEST_CASE("compute waits for a copy out where memory would pass the limit") {
  StepRecord record = two_storages_and_a_need();
  record.storages[1].saved_ms = 14;
  const Prediction found = predicted(record, {kOffload, kKeep, kKeep}, 24);
  CHECK(found.stalled_ms == 6);
  CHECK(found.step_ms == 86);
  CHECK(found.peak_bytes == 15);
}

TEST_CASE("other memory counts, and compute waits for it too") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {25, 12}};
  const Prediction found = predicted(record, {kOffload, kOffload}, 15);
  CHECK(found.stalled_ms ==
        30);  // at the second save, until 30: it is the last chance before 25. Then for each copy in
  CHECK(found.peak_bytes == 22);  // which has no room before it is needed
}

TEST_CASE("copies out wait for each other") {
  StepRecord record = two_storages();
  record.storages[1].saved_ms = 12;
  record.other = {{0, 5}, {29, 16}, {40, 5}};
  CHECK(predicted(record, {kOffload, kOffload}, 25).stalled_ms == 18);  // from 12; 10 to 20, then 20 to 30
}

TEST_CASE("a copy in starts when there is room, and compute waits for what is late") {
  StepRecord record = two_storages_and_a_need();
  record.storages[0].needed_ms = 62;
  CHECK(predicted(record, {kOffload, kKeep, kKeep}).stalled_ms == 0);  // 40 to 50
  const Prediction found = predicted(record, {kOffload, kKeep, kKeep}, 15);
  CHECK(found.stalled_ms == 8);  // from 60, when backward asks for something else, to 70
  CHECK(found.peak_bytes == 15);
}

TEST_CASE("a copy in does not start where other memory will need the room before the use") {
  StepRecord record = two_storages_and_a_need();
  record.other = {{0, 5}, {45, 15}, {55, 5}};
  const Prediction found = predicted(record, {kOffload, kKeep, kKeep}, 25);
  CHECK(found.peak_bytes == 25);
  CHECK(found.stalled_ms == 0);  // 60 to 70
}

TEST_CASE("copies in start beside the memory that backward begins with, and not beside what forward had until then") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {30, 25}, {40, 5}};
  const Prediction found = predicted(record, {kOffload, kKeep}, 35);
  CHECK(found.peak_bytes == 35);
  CHECK(found.stalled_ms == 0);  // 40 to 50
}

TEST_CASE("a storage that is still on the device is not copied in") {
  StepRecord record = two_storages();
  record.storages[0] = {.bytes = 100, .saved_ms = 10, .needed_ms = 70, .released_ms = 80};
  const Prediction found = predicted(record, {kOffload, kKeep});
  CHECK(found.stalled_ms == 0);  // the copy out would take until 110
  CHECK(found.step_ms == 80);
}

TEST_CASE("copies in come in the order of need") {
  StepRecord record = two_storages();
  record.storages[0].needed_ms = 60;
  CHECK(predicted(record, {kOffload, kOffload}).stalled_ms == 0);  // 40 to 50 and 50 to 60
  std::swap(record.storages[0].needed_ms, record.storages[1].needed_ms);
  CHECK(predicted(record, {kOffload, kOffload}).stalled_ms == 0);
}

TEST_CASE("what a recipe has made counts once beside a copy in") {
  StepRecord record = two_storages_and_a_need();
  record.storages[0].needed_ms = 62;
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  record.other = {{0, 5}, {40, 24}, {49, 5}};  // backward begins with no room
  const Prediction found = predicted(record, {kOffload, kRecompute, kKeep}, 25);
  CHECK(found.stalled_ms == 0);  // from 53, when the recipe has run, to 63
  CHECK(found.peak_bytes == 25);
  CHECK(predicted(record, {kOffload, kRecompute, kKeep}, 24).stalled_ms == 8);  // from 63, when the second is released
}

TEST_CASE("a run that makes several asks for copies in before it begins") {
  StepRecord record = two_storages();
  record.storages[0].needed_ms = 57;
  record.storages[1].recompute = Recompute::kComputeBound;
  record.storages[1].recompute_ms = 3;
  record.other = {{0, 5}, {40, 24}, {49, 5}};
  CHECK(predicted(record, {kOffload, kRecompute}, 25).stalled_ms == 3);  // from 53 to 63, and needed at 60
  record.storages[1].made_with = 1;
  CHECK(predicted(record, {kOffload, kRecompute}, 25).stalled_ms == 0);  // from 50
}

TEST_CASE("what only recipes ask for is there if one of them is to run, and nowhere otherwise") {
  StepRecord record = two_storages();
  record.storages[0].is_for_recipes = true;
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  record.storages[1].inputs = {0};
  for (const Decision decision : {kKeep, kOffload}) {
    const Prediction without = predicted(record, {decision, kKeep});
    CHECK(without.peak_bytes == 15);
    CHECK(without.kept_bytes + without.offloaded_bytes == 10);
  }
  const Prediction kept = predicted(record, {kKeep, kRecompute});
  CHECK(kept.peak_bytes == 25);
  CHECK(kept.step_ms == 83);
  const Prediction moved = predicted(record, {kOffload, kRecompute});
  CHECK(moved.step_ms == 83);  // comes back from 40 to 50, for the recipe
  CHECK(moved.offloaded_bytes == 10);
}

TEST_CASE("one run makes all that were dropped of those that are made together, and takes its time once") {
  StepRecord record = two_storages();
  for (StorageRecord& storage : record.storages) {
    storage.recompute = Recompute::kComputeBound;
    storage.recompute_ms = 3;
    storage.recompute_bytes = 4;
    storage.other_bytes = 5;
  }
  record.storages[0].made_with = 1;
  record.storages[1].made_with = 0;
  const Prediction both = predicted(record, {kRecompute, kRecompute});
  CHECK(both.step_ms == 83);
  CHECK(both.peak_bytes == 29);  // both, and the run's own, from 50 on
  const Prediction one = predicted(record, {kRecompute, kKeep});
  CHECK(one.step_ms == 83);
  CHECK(one.peak_bytes == 29);  // the second, which has been released, is made again, too
  CHECK(predicted(record, {kKeep, kRecompute}).peak_bytes == 39);
}

TEST_CASE("a recipe takes its time when its result is needed, and no memory before") {
  StepRecord record = two_storages();
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  const Prediction found = predicted(record, {kKeep, kRecompute});
  CHECK(found.step_ms == 83);
  CHECK(found.recompute_ms == 3);
  CHECK(found.peak_bytes == 25);
  record.other = {{0, 5}, {45, 0}};
  CHECK(predicted(record, {kKeep, kRecompute}).peak_bytes == 20);  // 15 until 45
}

TEST_CASE("what a recipe takes for itself counts while it runs, and where it does not run never") {
  StepRecord record = two_storages();
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  record.storages[1].recompute_bytes = 7;
  record.storages[1].other_bytes = 5;
  CHECK(predicted(record, {kKeep, kRecompute}).peak_bytes == 32);
  CHECK(predicted(record, {kKeep, kKeep}).peak_bytes == 25);
  record.other = {{0, 5}, {50, 11}};  // backward goes on with more than that, but not at the same time
  CHECK(predicted(record, {kKeep, kRecompute}).peak_bytes == 32);
}

TEST_CASE("what an input's recipe takes counts where it runs, which is when its result is first needed") {
  StepRecord record = two_storages();
  for (StorageRecord& storage : record.storages) {
    storage.recompute = Recompute::kMemoryBound;
  }
  record.storages[0].recompute_bytes = 7;
  record.storages[0].other_bytes = 1;
  record.storages[1].inputs = {0};
  record.storages[1].other_bytes = 20;
  CHECK(predicted(record, {kRecompute, kRecompute}).peak_bytes == 40);  // at 50 both, at 70 one
  CHECK(predicted(record, {kRecompute, kKeep}).peak_bytes == 18);       // the second is released before
}

TEST_CASE("a recipe's inputs are brought back first, and are on the device until they are released") {
  StepRecord record = two_storages();
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  record.storages[1].inputs = {0};
  record.storages[1].needed_ms = 45;
  const Prediction found = predicted(record, {kOffload, kRecompute});
  CHECK(found.stalled_ms == 5);  // its input arrives at 50
  CHECK(found.step_ms == 88);
  CHECK(found.peak_bytes == 25);
}

TEST_CASE("a storage that is released as soon as it is needed costs what it takes") {
  StepRecord record = two_storages();
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.storages[1].recompute_ms = 3;
  record.storages[1].released_ms = record.storages[1].needed_ms;
  CHECK(predicted(record, {kKeep, kRecompute}).step_ms == 83);
}

TEST_CASE("a copy out holds its source until it is done, though nobody needs that any more") {
  StepRecord record = two_storages();
  record.storages[0] = {.bytes = 1000, .saved_ms = 10, .needed_ms = 15, .released_ms = 18};
  record.storages[1].bytes = 1200;
  CHECK(predicted(record, {kOffload, kKeep}, 1100).stalled_ms == 990);  // from 20 to 1010
}

TEST_CASE("recipes run inside recipes, each once") {
  StepRecord record = two_storages();
  for (StorageRecord& storage : record.storages) {
    storage.recompute = Recompute::kMemoryBound;
    storage.recompute_ms = 2;
  }
  record.storages[1].inputs = {0};
  CHECK(predicted(record, {kRecompute, kRecompute}).recompute_ms == 4);
}

TEST_CASE("a storage that is released on its way out is not held") {
  StepRecord record = two_storages();
  record.storages[0] = {.bytes = 1000, .saved_ms = 10, .needed_ms = 15, .released_ms = 18};
  CHECK(predicted(record, {kOffload, kKeep}).peak_bytes == 1005);
  record.storages[1].bytes = 2000;
  CHECK(predicted(record, {kOffload, kKeep}).peak_bytes == 2005);
}

TEST_CASE("a storage that the forward pass still uses takes no memory of its own") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {30, 5}};
  record.storages[0].idle_ms = 30;
  CHECK(predicted(record, {kKeep, kKeep}).peak_bytes == 35);  // from 20 to 30
  record.storages[0].idle_ms = 29;
  CHECK(predicted(record, {kKeep, kKeep}).peak_bytes == 45);
}

TEST_CASE("a storage that the forward pass lets go of before it is saved takes memory from its save") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {10, 5}};
  record.storages[0].idle_ms = 5;
  CHECK(predicted(record, {kKeep, kKeep}).peak_bytes == 25);
}

TEST_CASE("a copy out may start and end while the forward pass still uses its storage") {
  StepRecord record = two_storages_and_a_need();
  record.storages[0].idle_ms = 30;
  record.storages[1].saved_ms = 15;
  const Prediction found = predicted(record, {kOffload, kKeep, kKeep}, 15);
  CHECK(found.stalled_ms == 5);   // at the second save: there is no later one to wait at
  CHECK(found.peak_bytes == 15);  // the copy is done at 20, and the first takes no memory at all before
}

TEST_CASE("a copy out that is late holds its storage from when the forward pass has let go of it") {
  StepRecord record = two_storages_and_a_need();
  record.storages[0].idle_ms = 17;
  record.storages[1].saved_ms = 12;
  CHECK(predicted(record, {kOffload, kKeep, kKeep}, 15).stalled_ms == 8);  // from 12 to 20
  record.storages[1].saved_ms = 25;
  CHECK(predicted(record, {kOffload, kKeep, kKeep}, 15).stalled_ms == 0);
  record.other = {{0, 5}, {18, 20}, {19, 5}};
  CHECK(predicted(record, {kOffload, kKeep, kKeep}).peak_bytes == 30);
}

TEST_CASE("copies out come in the order of saving, also where the forward pass lets go in another") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 31;
  record.storages[1].saved_ms = 12;
  record.other = {{0, 5}, {29, 16}, {40, 5}};
  CHECK(predicted(record, {kOffload, kOffload}, 25).stalled_ms == 18);  // from 12; 10 to 20, then 20 to 30
}

TEST_CASE("compute waits at a save for its own copy, where the forward pass lets go of it before there is room") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 12;
  record.storages[1].recompute = Recompute::kMemoryBound;
  record.other = {{0, 5}, {11, 16}, {14, 25}, {18, 5}};
  const Prediction found = predicted(record, {kOffload, kRecompute}, 25);
  CHECK(found.stalled_ms == 10);  // from 10 to 20
  CHECK(found.peak_bytes == 25);
}

}  // namespace
}  // namespace ebb
