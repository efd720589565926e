#include "policy/managed_replay.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

constexpr LinkRates kByteAMs{.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0};

// So many storages of 10 bytes, each used by one operation of forward.
std::vector<ManagedUse> one_after_another(std::uint32_t count, bool written = false) {
  std::vector<ManagedUse> uses;
  for (std::uint32_t i = 0; i < count; ++i) {
    uses.push_back({.item = i, .operation = i, .bytes = 10, .phase = Phase::kForward, .written = written});
  }
  return uses;
}

double forward_ms(const std::vector<ManagedUse>& uses, const ManagedRoom& room, double compute_ms) {
  return ManagedPace(uses, room).phases_ms({compute_ms, 0, 0}, kByteAMs)[0];
}

TEST_CASE("What is on the device is not waited for") {
  CHECK(forward_ms(one_after_another(4), {.device_bytes = 40, .stay_bytes = 40, .ahead_bytes = 20}, 8) == 8);
}

TEST_CASE("Where one storage fills the bound, copies and compute take turns") {
  const ManagedRoom room{.device_bytes = 10, .stay_bytes = 10, .ahead_bytes = 10};
  CHECK(forward_ms(one_after_another(4), room, 20) == 4 * (10 + 5));
  CHECK(forward_ms(one_after_another(4, /*written=*/true), room, 20) == 4 * (10 + 10 + 5));
}

TEST_CASE("Where there is room for the next storage, its copy runs beside compute") {
  const ManagedRoom room{.device_bytes = 20, .stay_bytes = 10, .ahead_bytes = 10};
  CHECK(forward_ms(one_after_another(4), room, 20) == 4 * 10);
  CHECK(forward_ms(one_after_another(4), room, 60) == 60);
  const ManagedRoom wide{.device_bytes = 40, .stay_bytes = 10, .ahead_bytes = 20};
  CHECK(forward_ms(one_after_another(8, /*written=*/true), wide, 20) == 8 * 10);
}

TEST_CASE("What is not asked for ahead is fetched when the operation before has ended") {
  const ManagedRoom room{.device_bytes = 20, .stay_bytes = 10, .ahead_bytes = 0};
  CHECK(forward_ms(one_after_another(4), room, 20) == 4 * (10 + 5));
}

TEST_CASE("An operation gets all of its storages, and later ones the bound") {
  std::vector<ManagedUse> uses = one_after_another(4);
  for (ManagedUse& use : uses) {
    use.operation = use.item / 2;
  }
  const ManagedRoom room{.device_bytes = 10, .stay_bytes = 10, .ahead_bytes = 10};
  CHECK(forward_ms(uses, room, 10) == 2 * (20 + 5));
}

TEST_CASE("A storage made in an operation is not fetched, and its room is free when its last operation has ended") {
  const std::vector<ManagedUse> uses{{.item = 0, .operation = 0, .bytes = 10},
                                     {.item = 2, .operation = 0, .bytes = 10, .written = true, .is_new = true},
                                     {.item = 2, .operation = 1, .bytes = 10},
                                     {.item = 1, .operation = 2, .bytes = 10}};
  CHECK(forward_ms(uses, {.device_bytes = 30, .stay_bytes = 30, .ahead_bytes = 10}, 9) == 9);
  // 0 stays. 1 is asked for when the second operation begins, and gets the made storage's room when that has ended.
  CHECK(forward_ms(uses, {.device_bytes = 20, .stay_bytes = 20, .ahead_bytes = 10}, 9) == 9 + 10);
}

TEST_CASE("A storage that is used again is asked for once") {
  // 0 is used three times before 1 is. Within 20 bytes ahead 1 is asked for before the first of these, and arrives
  // while they run. 0 makes room for 1 after its last use, and is on its way for 10 ms, of which 1's operation hides 5.
  std::vector<ManagedUse> uses;
  for (const std::uint32_t item : {0U, 0U, 0U, 1U}) {
    uses.push_back({.item = item, .operation = static_cast<std::uint32_t>(uses.size()), .bytes = 10});
  }
  CHECK(forward_ms(uses, {.device_bytes = 20, .stay_bytes = 10, .ahead_bytes = 20}, 20) == 20 + 5);
}

TEST_CASE("No uses leave each phase its compute") {
  CHECK(ManagedPace({}, {.device_bytes = 10}).phases_ms({1, 2, 0}, kByteAMs) == EachPhase<double>{1, 2, 0});
}

TEST_CASE("Random periods last at least as long as their compute and as each lane's copies") {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same periods each time
  const auto below = [&](std::uint32_t limit) { return static_cast<std::uint32_t>(random() % limit); };
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::uint64_t> bytes(1 + below(8));
    std::ranges::generate(bytes, [&] { return 1 + below(9); });
    std::vector<ManagedUse> uses;
    const std::uint32_t count = 1 + below(40);
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t item = below(static_cast<std::uint32_t>(bytes.size()));
      uses.push_back({.item = item,
                      .operation = i,
                      .bytes = bytes[item],
                      .phase = static_cast<Phase>(3 * i / count),
                      .written = below(3) == 0});
    }
    const std::uint64_t bound = 10 + below(40);
    const ManagedRoom room{.device_bytes = bound, .stay_bytes = bound - below(10), .ahead_bytes = below(20)};
    const ManagedTraffic traffic = managed_traffic(uses, room.stay_bytes);
    const EachPhase<double> compute_ms{static_cast<double>(below(50)), static_cast<double>(below(50)), 0};
    const ManagedPace pace(uses, room);
    const EachPhase<double> phases = pace.phases_ms(compute_ms, kByteAMs);
    INFO("round " << round);
    double sum = 0;
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      CHECK(phases[phase] >= compute_ms[phase] - 1e-9);
      sum += phases[phase];
    }
    // The result is the mean of four periods, and a lane may have as much as the bound to carry before or after.
    CHECK(4 * sum + static_cast<double>(bound) >=
          static_cast<double>(4 * std::max(traffic.in_bytes(), traffic.out_bytes())));
    const EachPhase<double> slower =
        pace.phases_ms(compute_ms, {.out_bytes_per_ms = 0.5, .in_bytes_per_ms = 0.5, .ms_per_copy = 0});
    CHECK(slower[0] + slower[1] + slower[2] >= sum - 1e-9);
  }
}

}  // namespace
}  // namespace ebb
