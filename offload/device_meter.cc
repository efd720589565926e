#include "offload/device_meter.h"

#include <cstddef>

#include <c10/core/CachingDeviceAllocator.h>
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

DeviceRoom cuda_room(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto in_use = static_cast<std::uint64_t>(stats.allocated_bytes[kAll].current);
  const auto reserved = static_cast<std::uint64_t>(stats.reserved_bytes[kAll].current);
  const c10::cuda::CUDAGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {in_use, free + reserved - in_use};
}

}  // namespace ebb
