#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

#include "test/simulated/simulated_tier.h"

namespace ebb {

inline constexpr std::size_t kCount = 1500;  // floats in a tensor: more than a page, and not a whole number of them
inline constexpr std::size_t kBytes = kCount * sizeof(float);

using Tickets = std::vector<Ticket>;

inline void fill(void* memory, float value) { std::fill_n(static_cast<float*>(memory), kCount, value); }

inline bool holds(const void* memory, float value) {
  const auto* const floats = static_cast<const float*>(memory);
  return std::all_of(floats, floats + kCount, [value](float each) { return each == value; });
}

inline bool holds_nan(const void* memory) {
  const auto* const floats = static_cast<const float*>(memory);
  return std::all_of(floats, floats + kCount, [](float each) { return std::isnan(each); });
}

inline SimulatedTier immediate(Schedule schedule) { return SimulatedTier(schedule, 0, std::nullopt, false); }

inline SimulatedTier deferred(Schedule schedule) { return SimulatedTier(schedule, 0, std::nullopt, true); }

}  // namespace ebb
