#pragma once

#include <cstdint>
#include <limits>
#include <variant>

namespace ebb {

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// The goals that a plan may have. Device memory means the peak of all memory that the process has from LibTorch's
// allocator on the device, including parameters and gradients.

// The goal of the shortest step within `bytes` of device memory.
struct DeviceBytes {
  std::uint64_t bytes = kUnlimited;
};

// The goal of the least memory in a step that takes at most this fraction more time than with everything kept: 0.02 is
// two percent.
struct Slowdown {
  double fraction = 0;
};

// The goal of the least memory, however long the step takes.
struct LeastMemory {};

using Goal = std::variant<DeviceBytes, Slowdown, LeastMemory>;

// The goal DeviceBytes, of the memory that the process already has on the device and this share of the free memory.
struct ShareOfFree {
  double share = 1;
};

using DeviceBudget = std::variant<DeviceBytes, ShareOfFree, Slowdown, LeastMemory>;

}  // namespace ebb
