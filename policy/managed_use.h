#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace ebb {

// The parts of a training loop's period, which lasts from the beginning of a step to the beginning of the next.
enum class Phase : std::uint8_t { kForward, kBackward, kBetween };

inline constexpr std::size_t kPhases = 3;

// A figure for each Phase.
template <typename Figure>
using EachPhase = std::array<Figure, kPhases>;

// One use of a managed storage: of a parameter, a gradient or an optimizer's state, which is on the device around its
// uses only.
struct ManagedUse {
  std::uint32_t item = 0;       // the storage, or the place of storages that follow one another
  std::uint32_t operation = 0;  // the uses of one operation, which are at once, have one number and follow one another
  std::uint64_t bytes = 0;
  Phase phase = Phase::kForward;
  bool written = false;  // the home's bytes are old after the use
  bool is_new = false;  // the storage has just been made in its place, so that nothing is fetched. The storage that was
                        // in the place before has ended
};

// How managed storages share the room that a bound leaves them on the device.
struct ManagedRoom {
  std::uint64_t device_bytes = 0;  // the bound
  std::uint64_t stay_bytes = 0;    // what stays of it by Belady's rule, where copies under way have the rest
  std::uint64_t ahead_bytes = 0;   // how far ahead of its use a storage is fetched
};

// Where room is needed, one part in so many of the bound goes home besides, so that the lane out has the next copies
// when one is done. On an H100, a step of 1.5 billion parameters within 6 GB took 613 ms without, 469 with a sixteenth
// and 538 with an eighth.
inline constexpr std::uint64_t kPartsOfBound = 16;

// What stays of a bound when that part has gone home, and the least bound within which so many bytes stay.
inline std::uint64_t stays_of(std::uint64_t bound) { return bound - bound / kPartsOfBound; }
inline std::uint64_t bound_for(std::uint64_t bytes) { return bytes + bytes / (kPartsOfBound - 1) + 1; }

// How far ahead of their use managed storages are fetched within a bound, in bytes, where nobody says otherwise. What
// is fetched ahead takes the room of what would not have had to leave, and a lane that is not fed stands still. On an
// H100, 1.5 billion parameters within 11 GB took 497 ms a step with 1 GB ahead, 414 with 2, 408 with 3 and 438 with 5.5
// (bench/model --managed 11GB --prefetch ...); within 6 GB, 495 with 1 or 2 GB, and 534 with 3.
inline std::uint64_t fetched_ahead(std::uint64_t bound) { return std::min<std::uint64_t>(bound / 2, 2'000'000'000); }

}  // namespace ebb
