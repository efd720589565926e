#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policy/budget.h"
#include "policy/link.h"
#include "policy/managed_replay.h"
#include "policy/policy.h"
#include "policy/transfer_schedule.h"

namespace ebb {

// The limits that a plan must fit within.
struct Limits {
  std::uint64_t device_bytes = kUnlimited;  // of all device memory, at any time of the step
  std::uint64_t host_bytes = kUnlimited;    // of what is offloaded, at once
};

// The cost of a step under given decisions.
struct Prediction {
  double step_ms = 0;
  double stalled_ms = 0;         // the part of step_ms in which the compute stream waits for copies
  double recompute_ms = 0;       // the part of step_ms in which recipes run
  std::uint64_t peak_bytes = 0;  // of all device memory
  std::uint64_t kept_bytes = 0;  // of the storages, by decision; so are the next two
  std::uint64_t offloaded_bytes = 0;
  std::uint64_t recomputed_bytes = 0;
};

// The cost of a step that followed a plan.
struct StepCost {
  double ms = 0;                 // from the first save to the end of backward
  std::uint64_t peak_bytes = 0;  // of device memory, as in Prediction
};

// What managed storages have of the device and of the link under a plan, and what that leaves to the plan's storages.
struct ManagedShare {
  std::uint64_t device_bytes = 0;  // the bound of managed storages on the device
  ManagedTraffic traffic;          // of a period
  double between_ms = 0;           // the least that the copies between two steps take

  // How the step with these managed storages differs from the recorded one, if so many saved bytes are copied each way
  // and recipes run so long. Recipes hide copies as other compute does.
  std::uint64_t offloaded_bytes = 0;
  double recompute_ms = 0;
  std::int64_t more_bytes = 0;  // of other memory
};

// A decision for each storage of a StepRecord, and the schedule of the copies.
struct Plan {
  std::vector<Decision> decisions;
  Prediction predicted;
  std::uint64_t device_bytes = kUnlimited;  // the limit that the plan is made for
  TransferSchedule schedule;                // of the copies, within device_bytes
  bool fits = false;                        // false: no plan was found within device_bytes and the host's limit
  std::optional<ManagedShare> managed;      // where StepRecord::managed has uses
};

}  // namespace ebb
