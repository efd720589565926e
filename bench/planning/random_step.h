#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

#include "policy/step_record.h"

namespace ebb {

struct RandomStep {
  std::size_t storages;
  std::uint64_t other_bytes = 5;  // of device memory
  std::uint64_t head_bytes = 0;   // at most so much more device memory between the last save and backward
  bool still_in_use = false;      // a third of the storages, by the forward pass, for some time after their save
};

// A step of storages of 1 to 20 bytes, which backward needs in reverse. Half of them can be recomputed from some of the
// seven before.
[[nodiscard]] StepRecord random_step(std::mt19937_64& random, const RandomStep& step);

// The bytes of all the step's storages.
[[nodiscard]] std::uint64_t total_bytes(const StepRecord& record);

}  // namespace ebb
