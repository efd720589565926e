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
  kDeferred,  // its deferred copy could not start when the operation was over, nobody wanted that copy any more, or the
              // operation has failed or has written to it
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
  std::uint64_t capacity_bytes = 0;  // the bound in force, or 0 for none; of the pool, what the pool has reserved
};

// Counted since the offloader was made, or since Offloader::reset_stats; the `now` figures are as of the call. `pool`
// and `pool_growths` always count from the start.
struct Stats {
  Count saved;  // every pack; its `tensors` is the sum of those offloaded, dropped, deduplicated, kept and now deferred
  Count offloaded;                         // storages copied out
  Count dropped;                           // storages dropped, to be recomputed
  Count evicted;                           // storages kept by the policy that were copied out when the device was full
  Count deduplicated;                      // saves of a storage that ebb already holds in the same version
  std::array<Count, kKeptReasons> kept{};  // by KeptReason
  Count fetched;                           // copies in; several of one storage if a retained graph runs again
  Count recomputed;  // storages made again; one counts several times if a retained graph runs again
  Count reused;      // fetches that found an offloaded storage still on the device, and copied nothing
  Count still_held;  // of these, storages that the program itself has held: to move them has freed nothing

  std::uint64_t stalls = 0;  // waits that held the compute stream up
  double stalled_ms = 0;

  // Forward passes under a guard that saved a storage about which the policy was asked (Policy::least_bytes). The next
  // forward pass counts once backward has begun, or all saves of this forward pass have ended.
  std::uint64_t steps = 0;

  Level pool;  // host memory or spill file
  std::uint64_t pool_growths = 0;
  Level stash;            // sources whose copy out is not done
  Level window;           // prefetched and not yet used
  Level saved_on_device;  // all that ebb holds in device memory: kept by the policy (storages below Policy::least_bytes
                          // once for each save), kept for want of room, in the stash, or fetched
  Level saved_if_kept;    // saved_on_device if every storage stayed from its first save to the end of its last

  // Of storages given to Offloader::manage, with the gradients and states beside them:
  Count managed;            // those with a home now
  Level managed_on_device;  // of these, what is on the device, with what is being copied home
  Level managed_resident;   // what stays on the device (Parameters::resident_bytes)
  // Copies of managed storages to the device: those that a prefetch started, and those that a use started, and so
  // waited for.
  Count managed_prefetched;
  Count managed_fetched_late;
  Count managed_evicted;  // storages that were sent home because the device was full

  [[nodiscard]] const Count& kept_for(KeptReason reason) const { return kept[static_cast<std::size_t>(reason)]; }
};

// One point of the timeline: what ebb holds in device memory after a save, a use or a release.
struct TimelineSample {
  double ms = 0;                      // since the timeline was last taken
  std::uint64_t saved_on_device = 0;  // bytes
  bool backward = false;              // taken inside autograd's engine
};

// Writes a table of some twenty lines, each ended by a newline. Counts and bytes by what became of the saves come
// first, then the levels, then the waits. A line whose zero would say nothing is left out.
std::ostream& operator<<(std::ostream& out, const Stats& stats);

}  // namespace ebb
