#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ebb {

// Why a saved tensor was left as it is.
enum class Kept : std::uint8_t {
  kParameter,    // a leaf that requires a gradient, or any view of one
  kExcluded,     // shares a storage with something given to Offloader::exclude
  kOtherDevice,  // not on the offloader's device
  kEmpty,        // no bytes
  kUnmovable,    // sparse, quantized, nested, wrapped by a transform, or without a storage of its own
  kNonOwning,    // memory that LibTorch does not own (from_blob): moving it out would free nothing
  kPolicy,       // the policy said keep
  kNoRoom,       // the tier had no room
};
inline constexpr std::size_t kKeptReasons = 8;

// A short lower-case name for tables: "parameter", "no room".
std::string_view to_string(Kept reason);

struct Count {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;  // of the tensors' storages; each storage once for `offloaded` and `fetched`
};

struct Level {
  std::uint64_t now_bytes = 0;
  std::uint64_t peak_bytes = 0;
  std::uint64_t capacity_bytes = 0;  // the limit in force; 0 where there is none
};

// Counted since the offloader was made, or since Offloader::reset_stats; the `now` figures are as of the call. `pool`
// and `pool_growths` always count from the start.
struct Stats {
  Count saved;                             // every pack: by tensors, the sum of offloaded, deduplicated and all kept
  Count offloaded;                         // storages copied out
  Count deduplicated;                      // saves of a storage that ebb already holds in the same version
  std::array<Count, kKeptReasons> kept{};  // by Kept
  Count fetched;                           // storages copied in
  Count reused;                            // unpacks that found the storage still on the device: no copy

  std::uint64_t stalls = 0;  // waits that held the compute stream up
  double stalled_ms = 0;

  std::uint64_t steps = 0;

  Level pool;  // host memory or spill file
  std::uint64_t pool_growths = 0;
  Level stash;   // sources whose copy out is not done
  Level window;  // fetched ahead and not yet used
  Level
      saved_on_device;  // all bytes that ebb holds in device memory: kept by policy or for want of room, stash, fetched

  [[nodiscard]] const Count& kept_for(Kept reason) const { return kept[static_cast<std::size_t>(reason)]; }
};

}  // namespace ebb
