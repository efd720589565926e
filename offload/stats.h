#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace ebb {

// Why a saved tensor was left as it is.
enum class KeptReason : std::uint8_t {
  kParameter,    // a leaf that requires a gradient, or any view of one
  kExcluded,     // shares a storage with something given to Offloader::exclude
  kOtherDevice,  // not on the offloader's device
  kEmpty,        // no bytes
  kUnmovable,    // sparse, quantized, nested, wrapped by a transform, or without a storage of its own
  kNonOwning,    // memory that LibTorch does not own (from_blob): moving it out would free nothing
  kPolicy,       // the policy said keep
  kNoRoom,       // the tier had no room
  kCaptured,     // saved while the stream recorded a CUDA graph
  kDeferred,     // its copy waited for the operation to be over, and then could not start, or nobody wanted it any more
};
inline constexpr std::size_t kKeptReasons = 10;

// A short lower-case name for tables: "parameter", "no room".
std::string_view to_string(KeptReason reason);

struct Count {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;  // of the tensors' storages
};

struct Level {
  std::uint64_t now_bytes = 0;
  std::uint64_t peak_bytes = 0;
  std::uint64_t capacity_bytes = 0;  // the bound in force; 0 where there is none. The pool's: what it has reserved
};

// Counted since the offloader was made, or since Offloader::reset_stats; the `now` figures are as of the call. `pool`
// and `pool_growths` always count from the start.
struct Stats {
  Count saved;  // every pack: by tensors, the sum of offloaded, dropped, deduplicated, all kept, and those put off just
                // now
  Count offloaded;                         // storages copied out
  Count dropped;                           // storages let go, to be recomputed
  Count evicted;                           // storages kept by the policy that were copied out when the device was full
  Count deduplicated;                      // saves of a storage that ebb already holds in the same version
  std::array<Count, kKeptReasons> kept{};  // by KeptReason
  Count fetched;                           // copies in; more than one of a storage if a retained graph is run again
  Count recomputed;                        // storages made again; more than one as for `fetched`
  Count reused;                            // fetches that found a storage that went away still on the device: no copy

  std::uint64_t stalls = 0;  // waits that held the compute stream up
  double stalled_ms = 0;

  // Forward passes under a guard that saved something the policy was asked about (Policy::least_bytes). Backward has to
  // begin, or all their saves to end, for the next one to count.
  std::uint64_t steps = 0;

  Level pool;  // host memory or spill file
  std::uint64_t pool_growths = 0;
  Level stash;            // sources whose copy out is not done
  Level window;           // prefetched and not yet used
  Level saved_on_device;  // all that ebb holds in device memory: kept by policy (a storage that is below its
                          // Policy::least_bytes once for each save) or for want of room, stash, fetched
  Level saved_if_kept;    // what that would be if every storage stayed from its first save to the end of its last

  [[nodiscard]] const Count& kept_for(KeptReason reason) const { return kept[static_cast<std::size_t>(reason)]; }
};

// A table of some twenty lines, each ended: counts and bytes by what became of the saves, then the levels, then the
// waits. What may be zero and then says nothing is left out.
std::ostream& operator<<(std::ostream& out, const Stats& stats);

}  // namespace ebb
