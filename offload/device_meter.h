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

// What LibTorch's allocator has handed out on a CUDA device, and what the allocator may still hand out. The latter is
// the memory that it caches and the memory that the device has free, up to the limit of setMemoryFraction.
struct DeviceHeadroom {
  std::uint64_t in_use_bytes = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t untaken_bytes = 0;  // free_bytes without what the allocator caches
  std::uint64_t unsplit_bytes = 0;  // free_bytes without the holes beside memory in use: one request may have these
};
[[nodiscard]] DeviceHeadroom cuda_headroom(c10::Device device);

// DeviceHeadroom::unsplit_bytes where LibTorch's segments are expandable. The allocator's statistics count no holes
// there, because unused pages of a segment go back to the device one by one. So cuda_headroom() takes all that is
// cached for unsplit. A hole's first and last page may be in use, and these are 20 MiB each. This function counts whole
// pages from a snapshot of the allocator. The snapshot takes time in proportion to the number of blocks. It also takes
// the locks of all devices, one after the other: a caller that holds one of these must know that nobody uses the
// others.
[[nodiscard]] std::uint64_t cuda_unsplit_bytes_by_pages(c10::Device device);

// Whether LibTorch's segments are expandable (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).
[[nodiscard]] bool uses_expandable_segments();

}  // namespace ebb
