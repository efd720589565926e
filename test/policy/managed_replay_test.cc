#include "policy/managed_replay.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/budget.h"

namespace ebb {
namespace {

// One storage an operation.
ManagedUse read(std::uint32_t item, std::uint32_t operation, Phase phase = Phase::kForward) {
  return {.item = item, .operation = operation, .bytes = 10, .phase = phase};
}

// Forward and backward through some layers.
std::vector<ManagedUse> there_and_back(std::uint32_t layers) {
  std::vector<ManagedUse> uses;
  for (std::uint32_t i = 0; i < layers; ++i) {
    uses.push_back(read(i, static_cast<std::uint32_t>(uses.size())));
  }
  for (std::uint32_t i = layers; i-- > 0;) {
    uses.push_back(read(i, static_cast<std::uint32_t>(uses.size()), Phase::kBackward));
  }
  return uses;
}

TEST_CASE("Of layers used there and back, those at both turns stay") {
  // Within three of five layers: 0, 1 and 2 are there when forward begins. 3 and 4 are fetched, and 1 and 2, or 2 and
  // 1, come back when backward asks for them.
  const ManagedTraffic traffic = managed_traffic(there_and_back(5), 30);
  CHECK(traffic.in[0].bytes == 20);
  CHECK(traffic.in[1].bytes == 20);
  CHECK(traffic.in[0].copies == 2);
  CHECK(traffic.out_bytes() == 0);
  CHECK(traffic.peak_bytes == EachPhase<std::uint64_t>{30, 30, 30});
}

TEST_CASE("Within a bound for all nothing moves, and the peak is all") {
  const ManagedTraffic traffic = managed_traffic(there_and_back(5), 50);
  CHECK(traffic.bytes() == 0);
  CHECK(traffic.peak_bytes[0] == 50);
}

TEST_CASE("What is used between steps is there in the step, too") {
  std::vector<ManagedUse> uses{read(0, 0, Phase::kBetween), read(1, 1, Phase::kBetween)};
  CHECK(managed_traffic(uses, 20).peak_bytes == EachPhase<std::uint64_t>{20, 20, 20});
}

TEST_CASE("A storage that is written goes home when it leaves, and not before") {
  std::vector<ManagedUse> uses = there_and_back(3);
  uses.front().written = true;
  CHECK(managed_traffic(uses, 30).out_bytes() == 0);
  const ManagedTraffic tight = managed_traffic(uses, 10);
  CHECK(tight.out[0].bytes == 10);
  CHECK(tight.out_bytes() == 10);
}

TEST_CASE("A gradient that is made anew in each period is not fetched when made and not sent home when it has ended") {
  std::vector<ManagedUse> uses = there_and_back(2);
  uses.push_back({.item = 7, .operation = 4, .bytes = 10, .phase = Phase::kBackward, .written = true, .is_new = true});
  uses.push_back(read(0, 5, Phase::kBackward));
  uses.push_back(read(1, 6, Phase::kBackward));
  uses.push_back(read(7, 7, Phase::kBetween));
  const ManagedTraffic all = managed_traffic(uses, 30);
  CHECK(all.bytes() == 0);
  CHECK(all.peak_bytes == EachPhase<std::uint64_t>{20, 30, 30});
  const ManagedTraffic tight = managed_traffic(uses, 10);
  CHECK(tight.out[1].bytes == 10);  // the gradient, once
  CHECK(tight.out_bytes() == 10);
  CHECK(tight.in[2].bytes == 10);
}

TEST_CASE("The storages of one operation are there at once, whatever the bound") {
  std::vector<ManagedUse> uses{read(0, 0), read(1, 0), read(2, 0), read(3, 1)};
  CHECK(largest_operation(uses, Phase::kForward) == 30);
  CHECK(largest_operation(uses, Phase::kBackward) == 0);
  const ManagedTraffic traffic = managed_traffic(uses, 10);
  CHECK(traffic.peak_bytes[0] == 30);
  CHECK(traffic.in_bytes() == 40);
}

TEST_CASE("No uses make no traffic") {
  CHECK(managed_traffic({}, 10).bytes() == 0);
  CHECK(largest_operation({}, Phase::kForward) == 0);
}

// The same rule, written to be read: before each fetch whatever is used last leaves.
ManagedTraffic slow_traffic(const std::vector<ManagedUse>& uses, std::uint64_t bound) {
  struct There {
    std::uint64_t bytes;
    bool written;
    std::uint64_t operation;
  };
  const std::size_t n = uses.size();
  ManagedTraffic traffic;
  std::map<std::uint32_t, There> there;
  std::uint64_t operation = 0;
  const auto next_use = [&](std::uint32_t item, std::size_t after) {
    std::size_t next = after + 1;
    while (uses[next % n].item != item) {
      ++next;
    }
    return next;
  };
  const auto held = [&] {
    std::uint64_t bytes = 0;
    for (const auto& [item, each] : there) {
      bytes += each.bytes;
    }
    return bytes;
  };
  std::size_t phase_before = 0;
  for (std::size_t place = 0; place < 2 * n; ++place) {
    const ManagedUse& use = uses[place % n];
    phase_before = place % n == 0 ? 0 : phase_before;
    for (; place >= n; ++phase_before) {  // what was there when this phase began, and those before without a use
      traffic.peak_bytes[phase_before] = std::max(traffic.peak_bytes[phase_before], held());
      if (phase_before == static_cast<std::size_t>(use.phase)) {
        break;
      }
    }
    if (place % n == 0 || use.operation != uses[place % n - 1].operation) {
      ++operation;
    }
    const bool counts = place >= n;
    const auto phase = static_cast<std::size_t>(use.phase);
    if (!there.contains(use.item) && !use.is_new && counts) {
      traffic.in[phase].bytes += use.bytes;
      ++traffic.in[phase].copies;
    }
    const bool was_written = there.contains(use.item) && there[use.item].written && !use.is_new;
    there[use.item] = {use.bytes, use.written || was_written, operation};
    while (held() > bound) {
      std::pair<std::size_t, std::uint32_t> last{0, 0};
      for (const auto& [item, each] : there) {
        if (each.operation != operation) {
          last = std::max(last, {next_use(item, place), item});
        }
      }
      if (last.first == 0) {
        break;
      }
      if (there[last.second].written && counts) {
        traffic.out[phase].bytes += there[last.second].bytes;
        ++traffic.out[phase].copies;
      }
      there.erase(last.second);
    }
    if (counts) {
      traffic.peak_bytes[phase] = std::max(traffic.peak_bytes[phase], held());
    }
    if (uses[next_use(use.item, place) % n].is_new) {
      there.erase(use.item);
    }
  }
  for (std::size_t phase = phase_before; phase < kPhases; ++phase) {
    traffic.peak_bytes[phase] = std::max(traffic.peak_bytes[phase], held());
  }
  return traffic;
}

TEST_CASE("Random periods have the traffic of the rule as it is told") {
  std::mt19937 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same periods each time
  for (int round = 0; round < 2000; ++round) {
    const auto below = [&](std::uint32_t limit) { return static_cast<std::uint32_t>(random() % limit); };
    std::vector<std::uint64_t> bytes(1 + below(8));
    std::ranges::generate(bytes, [&] { return 1 + below(9); });
    std::vector<ManagedUse> uses;
    std::uint32_t operation = 0;
    for (std::uint32_t i = 1 + below(40); i > 0; --i) {
      const std::uint32_t item = below(static_cast<std::uint32_t>(bytes.size()));
      operation += below(3) == 0 ? 0 : 1;
      const bool is_again = std::ranges::any_of(
          uses, [&](const ManagedUse& use) { return use.operation == operation && use.item == item; });
      operation += is_again ? 1 : 0;
      uses.push_back({.item = item,
                      .operation = operation,
                      .bytes = bytes[item],
                      .phase = static_cast<Phase>(3 * uses.size() / 50),
                      .written = below(3) == 0,
                      .is_new = below(6) == 0});
    }
    const std::uint64_t bound = below(40);
    const ManagedTraffic fast = managed_traffic(uses, bound);
    const ManagedTraffic slow = slow_traffic(uses, bound);
    INFO("round " << round);
    for (std::size_t phase = 0; phase < kPhases; ++phase) {
      REQUIRE(fast.in[phase].bytes == slow.in[phase].bytes);
      REQUIRE(fast.out[phase].bytes == slow.out[phase].bytes);
      REQUIRE(fast.in[phase].copies == slow.in[phase].copies);
      REQUIRE(fast.out[phase].copies == slow.out[phase].copies);
      REQUIRE(fast.peak_bytes[phase] == slow.peak_bytes[phase]);
    }
  }
}

}  // namespace
}  // namespace ebb
