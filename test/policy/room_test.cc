#include "policy/room.h"

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

using Stash = std::vector<std::uint64_t>;
using Copies = std::vector<std::pair<std::uint32_t, std::uint64_t>>;  // storage and held bytes
using NeededAt = std::vector<std::pair<std::uint32_t, double>>;       // storage and time

Copies copies_in(const Room& room) {
  Copies copies;
  for (const Room::CopyIn& copy : room.copies_in) {
    copies.emplace_back(copy.storage, copy.held_bytes);
  }
  return copies;
}

NeededAt needed(const StepRecord& record, const std::vector<Decision>& decisions,
                const std::vector<std::uint32_t>& of_need) {
  NeededAt found;
  for (const NeededCopy& copy : needed_copies(record, decisions, of_need)) {
    found.emplace_back(copy.storage, copy.needed_ms);
  }
  return found;
}

TEST_CASE("copies out may hold what other memory leaves") {
  CHECK(make_room(two_storages(), {kOffload, kOffload}, 30).stash.after_save == Stash{25, 25});
}

TEST_CASE("what is kept takes room from copies out once it is saved") {
  CHECK(make_room(two_storages(), {kOffload, kKeep}, 30).stash.after_save == Stash{25, 15});
  CHECK(make_room(two_storages(), {kKeep, kOffload}, 30).stash.after_save == Stash{15, 15});
}

TEST_CASE("what is dropped takes no room from copies out") {
  StepRecord record = two_storages();
  recompute_from(record, 1, {});
  CHECK(make_room(record, {kOffload, kRecompute}, 30).stash.after_save == Stash{25, 25});
}

TEST_CASE("the most of other memory from a save to the next one counts for copies out") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {14, 12}, {16, 5}, {25, 9}, {30, 5}};
  CHECK(make_room(record, {kOffload, kOffload}, 30).stash.after_save == Stash{18, 21});
}

TEST_CASE("other memory from before a save does not count for copies out after it") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {5, 5}};
  CHECK(make_room(record, {kOffload, kOffload}, 30).stash.after_save == Stash{25, 25});
}

TEST_CASE("what is kept and still in use counts once for copies out, as other memory") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 25;
  record.other = {{0, 5}, {10, 15}, {25, 5}};
  CHECK(make_room(record, {kKeep, kOffload}, 30).stash.after_save == Stash{15, 15});
}

TEST_CASE("the source of a copy out that is still in use takes room once, and not twice") {
  StepRecord record = two_storages();
  record.storages[0].idle_ms = 25;
  record.other = {{0, 5}, {10, 15}, {25, 5}};
  CHECK(make_room(record, {kOffload, kOffload}, 30).stash.after_save == Stash{25, 25});
}

TEST_CASE("when backward begins, what it takes to its end counts for copies out, of which the host may hear late") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {49, 12}, {50, 5}, {55, 20}};
  const StashRoom found = make_room(record, {kOffload, kOffload}, 30).stash;
  CHECK(found.after_save == Stash{25, 25});
  CHECK(found.in_backward == 10);
  CHECK(make_room(two_storages(), {kOffload, kKeep}, 30).stash.in_backward == 15);
  record.storages[1].recompute = Recompute::kMemoryBound;
  CHECK(make_room(record, {kOffload, kRecompute}, 40).stash.in_backward == 10);
}

TEST_CASE("there is no room for copies out of what backward itself saves") {
  StepRecord record = two_storages();
  record.storages[0].needed_ms = 15;
  CHECK(make_room(record, {kOffload, kOffload}, 30).stash.after_save == Stash{25, 0});
}

TEST_CASE("copies in come in the order of need, and may hold what other memory leaves") {
  CHECK(copies_in(make_room(two_storages(), {kOffload, kOffload}, 30)) == Copies{{1, 25}, {0, 25}});
}

TEST_CASE("what is kept is part of what copies in are held to") {
  CHECK(copies_in(make_room(two_storages(), {kOffload, kKeep}, 30)) == Copies{{0, 25}});
  CHECK(copies_in(make_room(two_storages(), {kKeep, kKeep}, 30)).empty());
}

TEST_CASE("the most of other memory from the need before to its own counts for a copy in") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {42, 12}, {44, 5}, {55, 9}, {58, 5}};
  CHECK(copies_in(make_room(record, {kOffload, kOffload}, 30)) == Copies{{1, 18}, {0, 21}});
}

TEST_CASE("other memory from before the need of what is kept counts for the next copy in") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {42, 12}, {44, 5}};
  CHECK(copies_in(make_room(record, {kOffload, kKeep}, 30)) == Copies{{0, 18}});
}

TEST_CASE("other memory of forward does not count for copies in") {
  StepRecord record = two_storages();
  record.other = {{0, 25}, {35, 5}};
  CHECK(copies_in(make_room(record, {kOffload, kOffload}, 30)) == Copies{{1, 25}, {0, 25}});
}

TEST_CASE("what will be recomputed before a copy in is released takes room from it") {
  StepRecord record = two_storages();
  record.storages[1].released_ms = 75;
  recompute_from(record, 1, {});
  CHECK(copies_in(make_room(record, {kOffload, kRecompute}, 30)) == Copies{{0, 15}});
  record.storages[1].needed_ms = 81;
  record.storages[1].released_ms = 82;
  CHECK(copies_in(make_room(record, {kOffload, kRecompute}, 30)) == Copies{{0, 25}});
}

TEST_CASE("a copy in has room until it is released, for other memory may rise before that") {
  StepRecord record = two_storages();
  record.other = {{0, 5}, {55, 12}, {58, 5}};
  CHECK(copies_in(make_room(record, {kKeep, kOffload}, 30)) == Copies{{1, 18}});
  record.other = {{0, 5}, {61, 12}};
  CHECK(copies_in(make_room(record, {kKeep, kOffload}, 30)) == Copies{{1, 25}});
}

TEST_CASE("there is no room where other memory takes it all") {
  const Room room = make_room(two_storages(), {kOffload, kKeep}, 3);
  CHECK(room.stash.after_save == Stash{0, 0});
  CHECK(copies_in(room) == Copies{{0, 0}});
}

TEST_CASE("there is room for everything where memory has no limit") {
  const Room room = make_room(two_storages(), {kOffload, kOffload}, kUnlimited);
  for (const std::uint64_t bytes : room.stash.after_save) {
    CHECK(bytes > 1'000'000);
  }
  for (const Room::CopyIn& copy : room.copies_in) {
    CHECK(copy.held_bytes > 1'000'000);
  }
}

TEST_CASE("a step without storages needs no room") {
  StepRecord record;
  record.other = {{0, 5}};
  record.end_ms = 10;
  const Room room = make_room(record, {}, 30);
  CHECK(room.stash.after_save.empty());
  CHECK(room.copies_in.empty());
}

TEST_CASE("what is offloaded is needed when its record says so, in the order that is given") {
  CHECK(needed(two_storages(), {kOffload, kOffload}, {1, 0}) == NeededAt{{1, 50}, {0, 70}});
  CHECK(needed(two_storages(), {kOffload, kKeep}, {1, 0}) == NeededAt{{0, 70}});
}

TEST_CASE("a recipe's inputs are needed in their order when its result is, and not again later") {
  StepRecord record = three_storages();
  recompute_from(record, 2, {0, 1});
  CHECK(needed(record, {kOffload, kOffload, kRecompute}, {2, 1, 0}) == NeededAt{{0, 45}, {1, 45}});
}

TEST_CASE("recipes inside recipes need their inputs at the need of the outermost") {
  StepRecord record = three_storages();
  recompute_from(record, 1, {0});
  recompute_from(record, 2, {1});
  CHECK(needed(record, {kOffload, kRecompute, kRecompute}, {2, 1, 0}) == NeededAt{{0, 45}});
}

TEST_CASE("a storage that is needed by itself before a recipe needs it is needed then") {
  StepRecord record = three_storages();
  recompute_from(record, 1, {0});
  record.storages[0].needed_ms = 42;
  CHECK(needed(record, {kOffload, kRecompute, kOffload}, {0, 2, 1}) == NeededAt{{0, 42}, {2, 45}});
}

TEST_CASE("the recipe of what is not recomputed needs no inputs") {
  StepRecord record = three_storages();
  recompute_from(record, 2, {0});
  CHECK(needed(record, {kOffload, kKeep, kKeep}, {2, 1, 0}) == NeededAt{{0, 70}});
  CHECK(needed(record, {kOffload, kKeep, kOffload}, {2, 1, 0}) == NeededAt{{2, 45}, {0, 70}});
}

TEST_CASE("a recipe's inputs that are kept need no copy") {
  StepRecord record = three_storages();
  recompute_from(record, 2, {0, 1});
  CHECK(needed(record, {kKeep, kOffload, kRecompute}, {2, 1, 0}) == NeededAt{{1, 45}});
}

}  // namespace
}  // namespace ebb
