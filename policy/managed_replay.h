#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/managed_use.h"

namespace ebb {

// What the uses of managed storages make the link carry in a period, and take of the device.
struct ManagedTraffic {
  struct Lane {
    std::uint64_t bytes = 0;
    std::uint64_t copies = 0;
  };
  EachPhase<Lane> in{};
  EachPhase<Lane> out{};
  EachPhase<std::uint64_t> peak_bytes{};  // of managed storages on the device, whether or not the phase uses them

  // Of all phases.
  [[nodiscard]] std::uint64_t in_bytes() const { return in[0].bytes + in[1].bytes + in[2].bytes; }
  [[nodiscard]] std::uint64_t out_bytes() const { return out[0].bytes + out[1].bytes + out[2].bytes; }
  [[nodiscard]] std::uint64_t bytes() const { return in_bytes() + out_bytes(); }
};

// What happens to managed storages on the device in a period.
struct ManagedPeriod {
  struct Event {
    enum class Kind : std::uint8_t {
      kBegin,  // of an operation, whose events follow
      kFetch,
      kMake,   // a new storage, in the operation
      kLeave,  // makes room for a storage of the operation. Storages that were written are copied out
      kEnd,    // after its last use, in the operation
    };

    Kind kind;
    Phase phase;
    std::uint64_t bytes = 0;
    std::size_t use = 0;             // of kFetch
    bool written = false;            // of kLeave
    std::size_t last_operation = 0;  // of kLeave: the storage's. The first period's first operation is 0
  };

  std::vector<Event> events;  // in order
  ManagedTraffic traffic;
};

// Plays through periods of uses that come again and again, where at most `limit` bytes of managed storages are on the
// device; the storages of one operation are there at once, whatever the limit is. Belady's rule decides what leaves:
// what is used last of all. Source of the rule: L. A. Belady, "A study of replacement algorithms for a virtual-storage
// computer", IBM Systems Journal 5 (2), 1966.
//
// Returns `count` periods. The first one begins with an empty device, and the second has the traffic of the later ones.
// Each takes time in proportion to n log n, n being the number of uses. Deterministic. Threads: any, as with the
// functions below.
[[nodiscard]] std::vector<ManagedPeriod> replay_periods(std::span<const ManagedUse> uses, std::uint64_t limit,
                                                        int count);

// The traffic of a period that comes again and again within this limit.
[[nodiscard]] inline ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t limit) {
  return replay_periods(uses, limit, 2).back().traffic;
}

// The bytes of the operation of a phase that uses the most at once.
[[nodiscard]] std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase);

}  // namespace ebb
