#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/step_record.h"

namespace ebb {

// How many bytes the sources of copies out may hold. Over the bound, compute waits for the oldest copy.
struct StashSchedule {
  std::vector<std::uint64_t> after_save;  // by storage, in the order of saving: the bound until the next save or
                                          // backward. 0 after saves that backward itself makes
  std::uint64_t in_backward = 0;          // the bound while backward runs: the host may be far ahead of the
                                          // device, and lets go only of sources that it knows to be copied
};

// The copies in, and the bounds under which each copy may start.
struct PrefetchSchedule {
  // Backward is divided into parts. The first part starts when backward begins, and a new part starts whenever backward
  // itself, and no recipe, asks for a storage for the first time.
  std::vector<std::uint32_t> needed;      // the storages whose needs begin the parts after the first
  std::vector<std::uint64_t> held_bytes;  // by part, one more than `needed`: the limit less other memory and less the
                                          // bytes recomputed by then

  // The copies in, in the order in which backward or its recipes need them. A copy may start in a part if the bytes
  // that ebb then holds of the plan's storages, including the copied storage and without those that recipes have made,
  // are within `held_bytes` of each part from the present part to the copy's last.
  struct CopyIn {
    std::uint32_t storage = 0;
    std::uint32_t last_part = 0;  // the part in which the storage is released
  };
  std::vector<CopyIn> copies_in;
};

// How much device memory the runtime may use for copies at each point of a step, so that a plan's peak holds even if
// copies are slower or faster than predicted.
struct TransferSchedule {
  StashSchedule stash;
  PrefetchSchedule backward;
};

// Makes the schedule for a step under `decisions`. `events`: step_events(record). `device_bytes`: the limit of all
// device memory.
[[nodiscard]] TransferSchedule make_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                                             const std::vector<Decision>& decisions, std::uint64_t device_bytes);

}  // namespace ebb
