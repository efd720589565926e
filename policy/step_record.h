#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"

namespace ebb {

// What is known of one storage that autograd saved in a step. Times are milliseconds since the step began, on the
// device's compute timeline as it would be if nothing of what ebb does took time on it.
struct StorageRecord {
  std::uint64_t bytes = 0;
  double saved_ms = 0;     // its bytes are there, and the forward pass has no further need of them
  double needed_ms = 0;    // backward first asks for it
  double released_ms = 0;  // its last save ends; at least needed_ms

  Recompute recompute = Recompute::kNo;
  double recompute_ms = 0;              // of its operation alone, its inputs at hand
  std::vector<std::uint32_t> inputs{};  // what its recipe takes, as indices into StepRecord::storages, each below its
                                        // own; without what stays on the device anyway
};

// All that a plan is made from: one forward and backward pass.
struct StepRecord {
  struct Level {
    double ms = 0;
    std::uint64_t bytes = 0;
  };

  std::vector<StorageRecord> storages;  // in the order of saving
  std::vector<Level>
      other;               // device memory besides these storages (parameters, gradients, temporaries, the head): each
                           // level holds from its time to the next one's. In order of time; none before the first
  double backward_ms = 0;  // backward begins
  double end_ms = 0;       // and ends
};

}  // namespace ebb
