#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.h"

namespace ebb {

// What is known of one storage that autograd saved in a step. Times are milliseconds since the step began, on the
// device's compute timeline as it would be if nothing of what ebb does took time on it.
struct StorageRecord {
  std::uint64_t bytes = 0;
  double saved_ms = 0;     // its bytes are there, and a copy of them may start
  double idle_ms = 0;      // the forward pass has let go of it, at the latest at needed_ms; until then, it is part of
                           // the other memory. If that is before saved_ms, then saved_ms is meant
  double needed_ms = 0;    // backward first asks for it
  double released_ms = 0;  // its last save ends; at least needed_ms
  std::uint64_t other_bytes = 0;  // the other memory when it is needed, before backward goes on

  bool movable = true;  // false: a checkpointed region, `bytes` of which its function saves; kept, from when it begins
  Recompute recompute = Recompute::kNo;
  double recompute_ms = 0;              // of its operation alone, its inputs at hand
  std::uint64_t recompute_bytes = 0;    // what that operation takes meanwhile, besides its inputs and its result
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
  // Device memory besides these storages (parameters, gradients, temporaries, what is saved but still in use): each
  // level holds from its time to the next one's. In order of time; none before the first.
  std::vector<Level> other;
  double backward_ms = 0;  // backward begins
  double end_ms = 0;       // and ends
};

}  // namespace ebb
