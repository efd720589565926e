#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/link.h"
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

// The functions below are deterministic, and may be called from any thread. `uses`: of a period that comes again and
// again. They take time in proportion to n log n, n being the number of uses.

// The traffic of a period where at most `limit` bytes of managed storages are on the device; the storages of one
// operation are there at once, whatever the limit is. Belady's rule decides what leaves: what is used last of all.
// Source of the rule: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
// Journal 5 (2), 1966.
[[nodiscard]] ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t limit);

// The bytes of the operation of a phase that uses the most at once.
[[nodiscard]] std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase);

// What happens to a managed storage on the device, or to all in an operation.
struct ManagedEvent {
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

// How long the phases of a period last, if the device waits for each managed storage that an operation needs.
//
// Note [The pace of managed storages]
// The uses are played through in order, with a clock for the device and one for each lane. What leaves is what leaves
// in managed_traffic(). A storage is fetched once
//   - the lane in has carried what was asked for before,
//   - there is room: each byte of the bound is taken again when the operation that used it last has ended, and when it
//     has been copied out, if it was written, and
//   - the storage is among the next `ahead_bytes` of uses.
// An operation begins when the one before has ended and its storages have arrived. A storage that the operation makes
// waits for no room, because the program has made it by the time that anybody can tell. A phase's compute is shared out
// evenly among the phase's operations, of which each layer has about as many. So an optimizer's update of a large
// matrix, whose states alone fill the bound, waits for copies that nothing hides.
class ManagedPace {
 public:
  ManagedPace(std::span<const ManagedUse> uses, const ManagedRoom& room);

  // The ms of each phase, where its compute takes so long by itself. A phase without operations takes as long as its
  // compute.
  [[nodiscard]] EachPhase<double> phases_ms(const EachPhase<double>& compute_ms, const LinkRates& rates) const;

  // Of a period, within ManagedRoom::stay_bytes.
  [[nodiscard]] const ManagedTraffic& traffic() const { return traffic_; }

 private:
  std::uint64_t device_bytes_;
  std::vector<std::size_t> asked_earlier_;  // for each use, by how many operations
  std::vector<ManagedEvent> events_;        // of some periods
  std::size_t counted_from_ = 0;            // the first event that counts: the mean of the periods from there on does
  EachPhase<std::size_t> operations_{};     // of a period
  ManagedTraffic traffic_;
};

}  // namespace ebb
