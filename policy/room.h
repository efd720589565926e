#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"
#include "policy/step_events.h"
#include "policy/step_record.h"

namespace ebb {

// What sources of copies out may hold. Over it, compute waits for the oldest.
struct StashRoom {
  std::vector<std::uint64_t> after_save;  // by storage, in the order of saving: until the next save or backward. None
                                          // after saves that backward itself makes
  std::uint64_t in_backward = 0;          // from when it begins, and until it ends: the host may be far ahead of the
                                          // device, and lets go of what it knows to be copied
};

// How much device memory the runtime may use for copies at each point of a step, so that a plan's peak holds whenever
// copies turn out to be slower or faster than predicted.
struct Room {
  StashRoom stash;

  // The copies in, in the order in which backward needs them: by itself, or for what is recomputed from them. One may
  // start when all that ebb then holds of the plan's storages, this one included, is within the least `held_bytes` from
  // the next copy that is needed to this one.
  struct CopyIn {
    std::uint32_t storage = 0;
    std::uint64_t held_bytes = 0;
  };
  std::vector<CopyIn> copies_in;
};

// `device_bytes`: of all device memory.
[[nodiscard]] Room make_room(const StepRecord& record, const std::vector<Decision>& decisions,
                             std::uint64_t device_bytes);

[[nodiscard]] StashRoom stash_room(const StepRecord& record, const std::vector<StepEvent>& events,
                                   const std::vector<Decision>& decisions, std::uint64_t device_bytes);

struct NeededCopy {
  std::uint32_t storage = 0;
  double needed_ms = 0;
};

// The storages that are offloaded, in the order in which backward needs them, a recipe's inputs before its result.
// `of_need`: all storages, in that order.
[[nodiscard]] std::vector<NeededCopy> needed_copies(const StepRecord& record, const std::vector<Decision>& decisions,
                                                    const std::vector<std::uint32_t>& of_need);

}  // namespace ebb
