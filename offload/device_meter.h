#pragma once

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>

namespace ebb {

// How much of a device's memory the process uses.
struct DeviceUse {
  std::uint64_t now_bytes = 0;
  std::uint64_t peak_bytes = 0;  // since the last call of the meter
};

// Returns what a device has in use. A meter is called from any thread, but never from two threads at once.
using DeviceMeter = std::function<DeviceUse()>;

// Measures what LibTorch's allocator has handed out on a CUDA device. Each call of the meter resets the allocator's
// peak (resetPeakStats).
[[nodiscard]] DeviceMeter cuda_meter(c10::Device device);

// What LibTorch's allocator has handed out on a CUDA device, and what it may still hand out: the memory that the
// allocator caches and the memory that the device has free, up to the limit of setMemoryFraction.
struct DeviceHeadroom {
  std::uint64_t in_use_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t unsplit_bytes = 0;  // free_bytes without the holes beside memory in use: one request may have these
};
[[nodiscard]] DeviceHeadroom cuda_headroom(c10::Device device);

}  // namespace ebb
