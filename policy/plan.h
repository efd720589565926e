#pragma once

#include <cstdint>
#include <vector>

#include "policy/budget.h"
#include "policy/policy.h"
#include "policy/transfer_schedule.h"

namespace ebb {

// What a plan must fit into.
struct Limits {
  std::uint64_t device_bytes = kUnlimited;  // of all device memory, at any time of the step
  std::uint64_t host_bytes = kUnlimited;    // of what is offloaded, at once
};

// How fast copies are. Measured on the machine (bench/link).
struct LinkRates {
  double out_bytes_per_ms = 55e6;
  double in_bytes_per_ms = 55e6;
  double ms_per_copy = 0.003;  // besides its bytes
};

// What a step costs under certain decisions.
struct Prediction {
  double step_ms = 0;
  double stalled_ms = 0;              // of that, waits of the compute stream for copies
  double recompute_ms = 0;            // of that, operations that run once more
  std::uint64_t peak_bytes = 0;       // of all device memory
  std::uint64_t kept_bytes = 0;       // of the storages, by decision
  std::uint64_t offloaded_bytes = 0;  //
  std::uint64_t recomputed_bytes = 0;
};

// What becomes of each storage of a StepRecord.
struct Plan {
  std::vector<Decision> decisions;
  Prediction predicted;
  std::uint64_t device_bytes = kUnlimited;  // the limit that it is made for
  TransferSchedule schedule;                // for copies, within that
  bool fits = false;                        // false: no plan was found that is within it, or within the host's
};

}  // namespace ebb
