#include "policy/transfer_schedule.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/budget.h"
#include "test/policy/two_storages.h"

namespace ebb {
namespace {

constexpr Decision kKeep = Decision::kKeep;
constexpr Decision kOffload = Decision::kOffload;
constexpr Decision kRecompute = Decision::kRecompute;

// The same with a third, saved at 30, that is needed from 45 to 50.
StepRecord three_storages() {
  StepRecord record = two_storages();
  record.storages.push_back({.bytes = 10, .saved_ms = 30, .needed_ms = 45, .released_ms = 50});
  return record;
}

void recompute_from(StepRecord& record, std::uint32_t storage, std::vector<std::uint32_t> inputs) {
  record.storages[storage].recompute = Recompute::kMemoryBound;
  record.storages[storage].recompute_ms = 1;
  record.storages[storage].inputs = std::move(inputs);
}

using Bytes = std::vector<std::uint64_t>;
using Copies = std::vector<std::pair<std::uint32_t, std::uint32_t>>;  // storage and last part

TransferSchedule schedule_of(const StepRecord& record, const std::vector<Decision>& decisions,
                             std::uint64_t device_bytes) {
  return make_schedule(record, step_events(record), decisions, device_bytes);
}

Copies copies_in(const StepRecord& record, const std::vector<Decision>& decisions) {
  Copies copies;
  for (const PrefetchSchedule::CopyIn& copy : schedule_of(record, decisions, 30).backward.copies_in) {
    copies.emplace_back(copy.storage, copy.last_part);
  }
  return copies;
}

Bytes held_bytes(const StepRecord& record, const std::vector<Decision>& decisions) {
  return schedule_of(record, decisions, 30).backward.held_bytes;
}

TEST_CASE("copies out may hold what other memory leaves") {
  CHECK(schedule_of(two_storages(), {kOffload, kOffload}, 30).stash.after_save == Bytes{25, 25});
}

TEST_CASE("what a recipe takes for itself is room that no copy may hold while it runs") {
  StepRecord record = two_storages();
  recompute_from(record, 1, {});
  const TransferSchedule without = schedule_of(record, {kOffload, kRecompute}, 30);
  record.storages[1].recompute_bytes = 7;
  record.storages[1].other_bytes = 5;
  const TransferSchedule with = schedule_of(record, {kOffload, kRecompute}, 30);
  REQUIRE(without.backward.needed == std::vector<std::uint32_t>{1, 0});
  CHECK(without.backward.held_bytes == Bytes{25, 15, 25});
  CHECK(with.backward.held_bytes == Bytes{25, 8, 25});
  CHECK(with.stash.in_backward == without.stash.in_backward - 7);
  CHECK(schedule_of(record, {kOffload, kKeep}, 30).backward.held_bytes == Bytes{25, 25, 25});
}

TEST_CASE("a recipe inside a recipe takes its room where the outer one runs") {
  StepRecord record = three_storages();  // the third is needed from 45, the second from 50, the first from 70
  recompute_from(record, 1, {});
  recompute_from(record, 2, {1});
  record.storages[1].recompute_bytes = 4;
  record.storages[1].other_bytes = 5;
  record.storages[2].other_bytes = 5;
  const TransferSchedule schedule = schedule_of(record, {kOffload, kRecompute, kRecompute}, 40);
  REQUIRE(schedule.backward.needed == std::vector<std::uint32_t>{2, 1, 0});
  CHECK(schedule.backward.held_bytes == Bytes{35, 15, 15, 35});  // at 45 both are made, and at 50 both are there
}

TEST_CASE("what is kept takes room from copies out once it is saved") {
  CHECK(schedule_of(two_storages(), {kOffload, kKeep}, 30).stash.after_save == Bytes{25, 15});
  CHECK(schedule_of(two_storages(), {kKeep, kOffload}, 30).stash.after_save == Bytes{15, 15});
}

TEST_CASE("what is dropped takes no room from copies out") {
  StepRecord record = two_storages();
  recompute_from(record, 1, {});
  CHECK(schedule_of(record, {kOffload, kRecompute}, 30).stash.after_save == Bytes{25, 25});
}

TEST_CASE("the most of other memory from a save to the next one counts for copies out") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {14, 12}, {16, 5}, {25, 9}, {30, 5}};
  CHECK(schedule_of(record, {kOffload, kOffload}, 30).stash.after_save == Bytes{18, 21});
}

TEST_CASE("other memory from before a save does not count for copies out after it") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {5, 5}};
  CHECK(schedule_of(record, {kOffload, kOffload}, 30).stash.after_save == Bytes{25, 25});
}

TEST_CASE("what is kept and still in use counts once for copies out, as other memory") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 25;
  record.other = {{0, 5}, {10, 15}, {25, 5}};
  CHECK(schedule_of(record, {kKeep, kOffload}, 30).stash.after_save == Bytes{15, 15});
}

TEST_CASE("the source of a copy out that is still in use takes room once, and not twice") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 25;
  record.other = {{0, 5}, {10, 15}, {25, 5}};
  CHECK(schedule_of(record, {kOffload, kOffload}, 30).stash.after_save == Bytes{25, 25});
}

TEST_CASE("when backward begins, what it takes to its end counts for copies out, of which the host may hear late") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {49, 12}, {50, 5}, {55, 20}};
  const StashSchedule found = schedule_of(record, {kOffload, kOffload}, 30).stash;
  CHECK(found.after_save == Bytes{25, 25});
  CHECK(found.in_backward == 10);
  CHECK(schedule_of(two_storages(), {kOffload, kKeep}, 30).stash.in_backward == 15);
  record.storages[1].recompute = Recompute::kMemoryBound;
  CHECK(schedule_of(record, {kOffload, kRecompute}, 40).stash.in_backward == 10);
}

TEST_CASE("there is no room for copies out of what backward itself saves") {
  StepRecord record = two_storages();
  record.storages[0].needed_ms = 15;
  CHECK(schedule_of(record, {kOffload, kOffload}, 30).stash.after_save == Bytes{25, 0});
}

TEST_CASE("backward has a part from when it begins, and one from each first need, whatever becomes of the storage") {
  const auto decisions = GENERATE(std::vector{kOffload, kOffload}, std::vector{kOffload, kKeep});
  CHECK(schedule_of(two_storages(), decisions, 30).backward.needed == std::vector<std::uint32_t>{1, 0});
  CHECK(held_bytes(two_storages(), decisions) == Bytes{25, 25, 25});
}

TEST_CASE("the most of other memory in a part counts there") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {42, 12}, {44, 5}, {55, 9}, {58, 5}, {75, 6}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{18, 21, 24});
}

TEST_CASE("other memory that lasts into a part counts there") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {45, 12}, {55, 5}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{18, 18, 25});
}

TEST_CASE("other memory of forward does not count for copies in, nor where backward begins with a level of its own") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {35, 5}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{25, 25, 25});
  record.other = {{0, 25}, {40, 5}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{25, 25, 25});
  record.other = {{0, 25}, {41, 5}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{5, 25, 25});
  record.other = {{0, 5}, {40, 20}, {40, 5}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{10, 25, 25});
}

TEST_CASE("a need from before backward begins a part too") {
  StepRecord record = two_storages();
  record.storages[1].needed_ms = 30;
  record.storages[1].released_ms = 31;
  record.other = {{0, 5}, {20, 9}, {40, 12}};
  CHECK(held_bytes(record, {kOffload, kOffload}) == Bytes{21, 18, 18});
}

TEST_CASE("what is recomputed takes room from its need to its release") {
  StepRecord record = two_storages();
  recompute_from(record, 1, {});
  CHECK(held_bytes(record, {kOffload, kRecompute}) == Bytes{25, 15, 25});
  record.storages[1].released_ms = 75;
  CHECK(held_bytes(record, {kOffload, kRecompute}) == Bytes{25, 15, 15});
}

TEST_CASE("there is no room where other memory takes it all") {
  const TransferSchedule schedule = schedule_of(two_storages(), {kOffload, kKeep}, 3);
  CHECK(schedule.stash.after_save == Bytes{0, 0});
  CHECK(schedule.backward.held_bytes == Bytes{0, 0, 0});
}

TEST_CASE("there is room for everything where memory has no limit") {
  const TransferSchedule schedule = schedule_of(two_storages(), {kOffload, kOffload}, kUnlimited);
  for (const Bytes& each : {schedule.stash.after_save, schedule.backward.held_bytes}) {
    CHECK(std::ranges::min(each) > 1'000'000);
  }
}

TEST_CASE("a step without storages has a schedule all the same") {
  StepRecord record;
  record.other = {{0, 5}};
  record.end_ms = 10;
  const TransferSchedule schedule = schedule_of(record, {}, 30);
  CHECK(schedule.stash.after_save.empty());
  CHECK(schedule.backward.needed.empty());
  CHECK(schedule.backward.copies_in.empty());
  CHECK(schedule.backward.held_bytes == Bytes{25});
}

TEST_CASE("copies in come in the order of need, each until the part in which it is released") {
  CHECK(copies_in(two_storages(), {kOffload, kOffload}) == Copies{{1, 1}, {0, 2}});
  CHECK(copies_in(two_storages(), {kOffload, kKeep}) == Copies{{0, 2}});
  CHECK(copies_in(two_storages(), {kKeep, kKeep}).empty());
  StepRecord record = two_storages();
  record.storages[1].released_ms = 71;
  CHECK(copies_in(record, {kOffload, kOffload}) == Copies{{1, 2}, {0, 2}});
}

TEST_CASE("a recipe's inputs are copied in their order before its result is needed, and not again later") {
  StepRecord record = three_storages();
  recompute_from(record, 2, {0, 1});
  CHECK(copies_in(record, {kOffload, kOffload, kRecompute}) == Copies{{0, 3}, {1, 2}});
}

TEST_CASE("recipes inside recipes need their inputs at the need of the outermost") {
  StepRecord record = three_storages();
  recompute_from(record, 1, {0});
  recompute_from(record, 2, {1});
  CHECK(copies_in(record, {kOffload, kRecompute, kRecompute}) == Copies{{0, 3}});
}

TEST_CASE("a storage that is needed by itself before a recipe needs it is copied then") {
  StepRecord record = three_storages();
  recompute_from(record, 1, {0});
  record.storages[0].needed_ms = 42;
  CHECK(copies_in(record, {kOffload, kRecompute, kOffload}) == Copies{{0, 3}, {2, 3}});
}

TEST_CASE("the recipe of what is not recomputed needs no inputs, and inputs that are kept need no copy") {
  StepRecord record = three_storages();
  recompute_from(record, 2, {0, 1});
  CHECK(copies_in(record, {kOffload, kKeep, kOffload}) == Copies{{2, 2}, {0, 3}});
  CHECK(copies_in(record, {kKeep, kOffload, kRecompute}) == Copies{{1, 2}});
}

}  // namespace
}  // namespace ebb
