#pragma once

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>

namespace ebb {

// A device's memory in use by the process.
struct DeviceUse {
  std::uint64_t now_bytes = 0;
  std::uint64_t peak_bytes = 0;  // since the last call
};

// Called from any thread, but never from two at once.
using DeviceMeter = std::function<DeviceUse()>;

// What LibTorch's allocator has handed out on a CUDA device. Sets its peak (resetPeakStats) back at each call.
[[nodiscard]] DeviceMeter cuda_meter(c10::Device device);

// What LibTorch's allocator has handed out on a CUDA device, and may still: what it keeps for later and what the device
// has free, as far as setMemoryFraction lets it take that.
struct DeviceHeadroom {
  std::uint64_t in_use_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t unsplit_bytes = 0;  // of the free ones, without holes beside memory in use: one request may have these
};
[[nodiscard]] DeviceHeadroom cuda_headroom(c10::Device device);

}  // namespace ebb
