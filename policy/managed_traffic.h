#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "policy/managed_use.h"

namespace ebb {

// What the uses of managed storages make the link carry in a period, and take of the device.
struct ManagedTraffic {
  struct Lane {
    std::uint64_t bytes = 0;
    std::uint64_t copies = 0;
  };
  EachPhase<Lane> in;
  EachPhase<Lane> out;
  EachPhase<std::uint64_t> peak_bytes{};  // of managed storages on the device, whether or not the phase uses them

  // Of all phases.
  [[nodiscard]] std::uint64_t in_bytes() const;
  [[nodiscard]] std::uint64_t out_bytes() const;
  [[nodiscard]] std::uint64_t bytes() const { return in_bytes() + out_bytes(); }
};

// Returns the traffic of a period that comes again and again, where at most `device_bytes` of managed storages are on
// the device (replay_periods). Storages that were written are copied out when they leave, others cost nothing. Takes
// time in proportion to n log n, n being the number of uses. Deterministic. Threads: any, as with the functions below.
[[nodiscard]] ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t device_bytes);

// How far ahead of their use managed storages are fetched within a bound, in bytes, where nobody says otherwise. What
// is fetched ahead takes the room of what would not have had to leave, and a lane that is not fed stands still. On an
// H100, 1.5 billion parameters within 11 GB took 497 ms a step with 1 GB ahead, 414 with 2, 408 with 3 and 438 with 5.5
// (bench/model --managed 11GB --prefetch ...); within 6 GB, 495 with 1 or 2 GB, and 534 with 3.
[[nodiscard]] inline std::uint64_t fetched_ahead(std::uint64_t device_bytes) {
  constexpr std::uint64_t kMost = 2'000'000'000;
  return std::min(device_bytes / 2, kMost);
}

// The bytes of the operation of a phase that uses the most at once.
[[nodiscard]] std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase);

}  // namespace ebb
