#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/planning/random_step.h"
#include "policy/plan.h"

namespace ebb {

inline constexpr std::uint64_t kOtherBytes = 100;

inline RandomStep step_of(std::size_t storages) {
  return {.storages = storages, .other_bytes = kOtherBytes, .head_bytes = 40};
}

inline LinkRates slow_link() { return {.out_bytes_per_ms = 1, .in_bytes_per_ms = 1, .ms_per_copy = 0.1}; }

inline bool fits(const Prediction& prediction, const Limits& limits) {
  return prediction.peak_bytes <= limits.device_bytes && prediction.offloaded_bytes <= limits.host_bytes;
}

// The best of all plans that fit; none if none does.
struct Best {
  bool fits = false;
  double step_ms = 0;
  std::uint64_t least_peak = kUnlimited;  // of all plans that the host has room for
};

}  // namespace ebb
