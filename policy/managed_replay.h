#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/managed_use.h"

namespace ebb {

// What happens to managed storages on the device in a period.
struct ManagedPeriod {
  struct Event {
    enum class Kind : std::uint8_t {
      kBegin,  // of an operation, whose events follow
      kFetch,
      kMake,   // a new storage, in the operation
      kLeave,  // makes room for a storage of the operation
      kEnd,    // after its last use, in the operation
    };

    Kind kind;
    Phase phase;
    std::uint64_t bytes = 0;
    std::size_t use = 0;             // of kFetch
    bool written = false;            // of kLeave
    std::size_t last_operation = 0;  // of kLeave: the storage's. The first period's first operation is 0
  };

  std::vector<Event> events;              // in order
  EachPhase<std::uint64_t> peak_bytes{};  // on the device, whether or not the phase uses them
};

// Plays through periods of uses that come again and again, where at most `limit` bytes of managed storages are on the
// device; the storages of one operation are there at once, whatever the limit is. Belady's rule decides what leaves:
// what is used last of all. Source of the rule: L. A. Belady, "A study of replacement algorithms for a virtual-storage
// computer", IBM Systems Journal 5 (2), 1966.
//
// Returns `count` periods. The first one begins with an empty device. Each takes time in proportion to n log n, n being
// the number of uses.
[[nodiscard]] std::vector<ManagedPeriod> replay_periods(std::span<const ManagedUse> uses, std::uint64_t limit,
                                                        int count);

}  // namespace ebb
