#include "test/random/device_bytes.h"

#include <chrono>
#include <thread>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "test/random/ready_queue.h"
#include "test/simulated/simulated_device_allocator.h"

namespace ebb::graphs {

std::uint64_t device_bytes(c10::Device device) {
  empty_ready_queue();
  if (device.is_cuda()) {
    at::globalContext().lazyInitDevice(c10::kCUDA);  // the allocator knows no device before
    c10::cuda::device_synchronize();
    at::cuda::clearCublasWorkspaces();
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[kAll].current;
  }
  const auto* const simulated = dynamic_cast<const SimulatedDeviceAllocator*>(c10::GetCPUAllocator());
  return simulated == nullptr ? 0 : simulated->bytes().now;
}

std::uint64_t settled_device_bytes(c10::Device device) {
  constexpr int kEnough = 5;
  std::uint64_t bytes = device_bytes(device);
  for (int same = 0; device.is_cuda() && same < kEnough;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::uint64_t now = device_bytes(device);
    same = now == bytes ? same + 1 : 0;
    bytes = now;
  }
  return bytes;
}

std::uint64_t device_bytes_at_rest(c10::Device device, std::uint64_t expected) {
  const auto patience = device.is_cuda() ? std::chrono::milliseconds(1000) : std::chrono::milliseconds(20);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::uint64_t bytes = device_bytes(device);
  while (bytes > expected && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    bytes = device_bytes(device);
  }
  return bytes;
}

}  // namespace ebb::graphs
