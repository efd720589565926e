#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policy/link.h"
#include "policy/managed_replay.h"
#include "policy/managed_room.h"
#include "policy/managed_use.h"

namespace ebb {

// How long the phases of a period last that comes again and again, if the device waits for each managed storage that an
// operation needs.
//
// Note [The pace of managed storages]
// The uses are played through in order (replay_periods), with a clock for the device and one for each lane. A storage
// is fetched once
//   - the lane in has carried what was asked for before,
//   - there is room: each byte of the bound is taken again when the operation that used it last has ended, and when it
//     has been copied out, if it was written, and
//   - the storage is among the next `ahead_bytes` of uses.
// An operation begins when the one before has ended and its storages have arrived. A storage that the operation makes
// waits for no room, because the program has made it by the time that anybody can tell. A phase's compute is shared out
// evenly among the phase's operations, of which each layer has about as many. So an optimizer's update of a large
// matrix, whose states alone fill the bound, waits for copies that nothing hides.
//
// Deterministic. Threads: members may be called from any thread.
class ManagedPace {
 public:
  // Takes time in proportion to n log n, n being the number of uses.
  ManagedPace(std::span<const ManagedUse> uses, const ManagedRoom& room);

  // The ms of each phase, where its compute takes so long by itself. A phase without operations takes as long as its
  // compute.
  [[nodiscard]] EachPhase<double> phases_ms(const EachPhase<double>& compute_ms, const LinkRates& rates) const;

  // Of a period, within ManagedRoom::stay_bytes.
  [[nodiscard]] const ManagedTraffic& traffic() const { return periods_[1].traffic; }

 private:
  std::uint64_t device_bytes_;
  std::vector<std::size_t> asked_earlier_;  // for each use, by how many operations
  std::vector<ManagedPeriod> periods_;      // the last ones' mean is the result
  EachPhase<std::size_t> operations_{};     // in these
};

}  // namespace ebb
