#include "streams/gpu/host_slabs.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "streams/base/fault_point.h"
#include "streams/base/system_memory.h"
#include "streams/base/wait_point.h"

namespace ebb {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kBytesPerToucher = std::size_t{4} << 20;
constexpr std::size_t kMaxTouchers = 16;

// The first write to a page makes the kernel find and clear it, and one thread does this far below the memory's rate:
// on an H200's host, slabs of 64 MiB are ready at 5.9 GiB/s with one thread, 12.6 with 4 and 16.8 with 16
// (bench/results/h200/pin.json).
void touch(std::byte* data, std::size_t bytes) {
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::clamp(bytes / kBytesPerToucher, std::size_t{1}, std::min(cores, kMaxTouchers));
  const std::size_t share = (bytes / count + kHugePage - 1) / kHugePage * kHugePage;
  const auto touch_share = [&](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(bytes, begin + share); at += kPageBytes) {
      data[at] = std::byte{0};
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t begin = share; begin < bytes; begin += share) {
    try {
      if (fails(FaultPoint::kThreadStart)) {
        throw std::system_error(EAGAIN, std::generic_category());
      }
      threads.emplace_back(touch_share, begin);
    } catch (const std::system_error&) {  // the system has no more threads: this thread touches the pages
      touch_share(begin);
    }
  }
  touch_share(0);
}

}  // namespace

HostSlabs::~HostSlabs() {
  if (slabs_.empty()) {
    return;
  }
  bool alive = false;
  try {
    const c10::cuda::CUDAGuard device(device_);
    alive = !in_force(WaitPoint::kSlabEnd) || cudaDeviceSynchronize() == cudaSuccess;
  } catch (...) {
  }
  for (Slab& slab : slabs_) {
    if (!alive || (pinned_ && cudaHostUnregister(slab.data) != cudaSuccess)) {
      static_cast<void>(slab.mapping.release());
    }
  }
  static_cast<void>(cudaGetLastError());
}

std::optional<std::uint64_t> HostSlabs::grow(std::size_t bytes) {
  if (bytes >= refused_bytes_ || !leaves_a_reserve(bytes)) {
    return std::nullopt;
  }
  // Two huge pages more than asked for: room to align the start, and a gap behind the end.
  AlignedMemory mapping = fails(FaultPoint::kPinnedAllocation) ? nullptr : map_pages(bytes + 2 * kHugePage);
  if (mapping == nullptr) {
    return std::nullopt;
  }
  const auto start = (reinterpret_cast<std::uintptr_t>(mapping.get()) + kHugePage - 1) / kHugePage * kHugePage;
  auto* const data = reinterpret_cast<std::byte*>(start);
  static_cast<void>(madvise(data, bytes, MADV_HUGEPAGE));  // advice: copies are as fast from small pages
  static_cast<void>(madvise(data, bytes, MADV_DONTFORK));  // without this, a fork would copy all page-locked memory
  touch(data, bytes);
  slabs_.reserve(slabs_.size() + 1);
  if (pinned_) {
    const c10::cuda::CUDAGuard device(device_);
    const cudaError_t error = fails(FaultPoint::kPinnedAllocation)
                                  ? cudaErrorMemoryAllocation
                                  : cudaHostRegister(data, bytes, cudaHostRegisterPortable);
    if (error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      if (error == cudaErrorMemoryAllocation) {  // a capture that is under way fails with another error
        refused_bytes_ = bytes;
      }
      return std::nullopt;
    }
  }
  slabs_.push_back({std::move(mapping), data});
  return start;
}

}  // namespace ebb
