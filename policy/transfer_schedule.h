#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/step_events.h"
#include "policy/step_record.h"

namespace ebb {

// What sources of copies out may hold. Over it, compute waits for the oldest.
struct StashSchedule {
  std::vector<std::uint64_t> after_save;  // by storage, in the order of saving: until the next save or backward. None
                                          // after saves that backward itself makes
  std::uint64_t in_backward = 0;          // from when it begins, and until it ends: the host may be far ahead of the
                                          // device, and lets go of what it knows to be copied
};

// What copies in leave room for.
struct PrefetchSchedule {
  // Backward in parts: the first from when it begins, and then one from each time that it itself asks for a storage
  // that it has not asked for before.
  std::vector<std::uint32_t> needed;      // those storages
  std::vector<std::uint64_t> held_bytes;  // by part, one more than `needed`: the limit less other memory and less what
                                          // is recomputed by then

  // The copies in, in the order in which backward needs them: by itself, or for what is recomputed from them. One may
  // start in a part when all that ebb then holds of the plan's storages, this one included, is within `held_bytes` of
  // each part from that one to its last.
  struct CopyIn {
    std::uint32_t storage = 0;
    std::uint32_t last_part = 0;  // in which it is released
  };
  std::vector<CopyIn> copies_in;
};

// How much device memory the runtime may use for copies at each point of a step, so that a plan's peak holds whenever
// copies turn out to be slower or faster than predicted.
struct TransferSchedule {
  StashSchedule stash;
  PrefetchSchedule backward;
};

// `device_bytes`: of all device memory. `events`: step_events(record).
[[nodiscard]] TransferSchedule make_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                                             const std::vector<Decision>& decisions, std::uint64_t device_bytes);

[[nodiscard]] StashSchedule stash_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                                           const std::vector<Decision>& decisions, std::uint64_t device_bytes);

[[nodiscard]] PrefetchSchedule prefetch_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                                                 const std::vector<Decision>& decisions, std::uint64_t device_bytes);

}  // namespace ebb
