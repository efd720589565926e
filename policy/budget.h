#pragma once

#include <cstdint>
#include <limits>
#include <variant>

namespace ebb {

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// What a plan is to reach. Device memory is all that the process has from LibTorch's allocator on that device,
// parameters and gradients included, at its peak.

// As fast as possible within so many bytes.
struct DeviceBytes {
  std::uint64_t bytes = kUnlimited;
};

// The least memory for at most this fraction more time than with all kept: 0.02 is two percent.
struct Slowdown {
  double fraction = 0;
};

// The least memory at any cost in time.
struct LeastMemory {};

using Goal = std::variant<DeviceBytes, Slowdown, LeastMemory>;

// As DeviceBytes: what the process has on the device already, and this share of what is free there.
struct ShareOfFree {
  double share = 1;
};

using DeviceBudget = std::variant<DeviceBytes, ShareOfFree, Slowdown, LeastMemory>;

}  // namespace ebb
