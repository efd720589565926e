#pragma once

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

}  // namespace ebb
