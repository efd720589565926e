#include "examples/common/device.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include "examples/common/counting_allocator.h"

namespace ebb {
namespace {

c10::CachingDeviceAllocator::Stat allocated(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

c10::Device parse_device(const std::string& name) {
  try {
    const c10::Device device(name);
    if (device.is_cpu() || device.is_cuda()) {
      return device;
    }
  } catch (const c10::Error&) {
    // Reported below, in the words of the flag.
  }
  throw std::invalid_argument("unknown device '" + name + "': use auto, cpu, cuda or cuda:N");
}

}  // namespace

c10::Device pick_device(const std::string& name) {
  const int gpus = c10::cuda::device_count();
  if (name == "auto") {
    return gpus > 0 ? c10::Device(c10::DeviceType::CUDA, 0) : c10::Device(c10::DeviceType::CPU);
  }
  const auto device = parse_device(name);
  if (device.is_cpu()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  const int index = device.has_index() ? device.index() : 0;
  if (index >= gpus) {
    throw std::invalid_argument("device " + name + " is not there: this machine has " + std::to_string(gpus) +
                                " usable GPUs");
  }
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

std::string device_name(c10::Device device) {
  if (device.is_cpu()) {
    return "cpu";
  }
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  return device.str() + " (" + properties.name + ")";
}

void use_deterministic_algorithms() {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Deterministic mode also fills every new tensor, which is for programs that read memory they never wrote.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

void synchronize(c10::Device device) {
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    c10::cuda::device_synchronize();
  }
}

DeviceMemory::DeviceMemory(c10::Device device) : device_(device) {
  if (device.is_cpu()) {
    CountingAllocator::install();
  } else {
    at::globalContext().lazyInitDevice(device.type());
  }
}

std::uint64_t DeviceMemory::now_bytes() const {
  return device_.is_cpu() ? CountingAllocator::install().now_bytes()
                          : static_cast<std::uint64_t>(allocated(device_).current);
}

std::uint64_t DeviceMemory::peak_bytes() const { return std::max(peak_before_, peak_of_allocator()); }

std::uint64_t DeviceMemory::peak_of_allocator() const {
  return device_.is_cpu() ? CountingAllocator::install().peak_bytes()
                          : static_cast<std::uint64_t>(allocated(device_).peak);
}

void DeviceMemory::reset() {
  if (device_.is_cuda()) {
    c10::getDeviceAllocator(device_.type())->emptyCache();
  }
  peak_before_ = 0;
  reset_allocator();
}

void DeviceMemory::reset_allocator() {
  if (device_.is_cpu()) {
    CountingAllocator::install().reset_peak();
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
  }
}

DeviceMeter DeviceMemory::meter() {
  return [this] {
    const DeviceUse use{now_bytes(), peak_of_allocator()};
    peak_before_ = std::max(peak_before_, use.peak_bytes);
    reset_allocator();
    return use;
  };
}

}  // namespace ebb
