#include "offload/device_meter.h"

#include <algorithm>
#include <cstddef>

#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace ebb {

DeviceMeter cuda_meter(c10::Device device) {
  return [device] {
    auto* const allocator = c10::getDeviceAllocator(device.type());
    const auto stats = allocator->getDeviceStats(device.index());
    allocator->resetPeakStats(device.index());
    const auto& bytes = stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    return DeviceUse{static_cast<std::uint64_t>(bytes.current), static_cast<std::uint64_t>(bytes.peak)};
  };
}

DeviceHeadroom cuda_headroom(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto now = [](const auto& stat) {
    return static_cast<std::uint64_t>(
        stat[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
  };
  const std::uint64_t in_use = now(stats.allocated_bytes);
  const std::uint64_t reserved = now(stats.reserved_bytes);
  const c10::cuda::CUDAGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto allowed = static_cast<std::uint64_t>(c10::cuda::CUDACachingAllocator::getMemoryFraction(device.index()) *
                                                  static_cast<double>(total));
  const std::uint64_t more = std::min<std::uint64_t>(free, std::max(allowed, reserved) - reserved);
  // Unused parts of expandable segments go back to the device one by one, so they count as no holes.
  const std::uint64_t holes = c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()
                                  ? 0
                                  : now(stats.inactive_split_bytes);
  return {in_use, more + reserved - in_use, more + reserved - std::min(reserved, now(stats.active_bytes) + holes)};
}

}  // namespace ebb
