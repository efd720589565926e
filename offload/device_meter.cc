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
namespace {

std::uint64_t now(const c10::CachingAllocator::StatArray& stat) {
  return static_cast<std::uint64_t>(stat[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
}

// What LibTorch's allocator, which has taken `reserved` bytes, may still take from the device.
std::uint64_t not_taken_bytes(c10::Device device, std::uint64_t reserved) {
  const c10::cuda::CUDAGuard guard(device);
  std::size_t free = 0;
  std::size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto allowed = static_cast<std::uint64_t>(c10::cuda::CUDACachingAllocator::getMemoryFraction(device.index()) *
                                                  static_cast<double>(total));
  return std::min<std::uint64_t>(free, std::max(allowed, reserved) - reserved);
}

// The bytes of a segment's pages that no block in use touches. A segment that is not expandable is one page.
std::uint64_t unused_page_bytes(const c10::CachingDeviceAllocator::SegmentInfo& segment) {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  const std::uint64_t of_a_pool = segment.is_large ? Config::large_segment_size() : c10::CachingAllocator::kSmallBuffer;
  const std::uint64_t page = segment.is_expandable ? of_a_pool : std::max<std::uint64_t>(segment.total_size, 1);
  std::uint64_t bytes = 0;
  std::uint64_t begin = 0;
  for (const auto& block : segment.blocks) {
    const std::uint64_t end = begin + block.size;
    const std::uint64_t first = (begin + page - 1) / page * page;
    const std::uint64_t last = end / page * page;
    if (!block.active && last > first) {
      bytes += last - first;
    }
    begin = end;
  }
  return bytes;
}

}  // namespace

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
  const std::uint64_t in_use = now(stats.allocated_bytes);
  const std::uint64_t reserved = now(stats.reserved_bytes);
  const std::uint64_t more = not_taken_bytes(device, reserved);
  const std::uint64_t holes = uses_expandable_segments() ? 0 : now(stats.inactive_split_bytes);
  return {.in_use_bytes = in_use,
          .free_bytes = more + reserved - in_use,
          .untaken_bytes = more,
          .unsplit_bytes = more + reserved - std::min(reserved, now(stats.active_bytes) + holes)};
}

std::uint64_t cuda_unsplit_bytes_by_pages(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  std::uint64_t bytes = not_taken_bytes(device, now(stats.reserved_bytes));
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot({0, 0}, /*include_traces=*/false).segments) {
    const bool is_private = segment.owner_private_pool_id != c10::MempoolId_t{0, 0};  // a CUDA graph's
    if (segment.device == device.index() && !is_private) {
      bytes += unused_page_bytes(segment);
    }
  }
  return bytes;
}

bool uses_expandable_segments() { return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(); }

}  // namespace ebb
