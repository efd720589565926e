#include "streams/gpu/host_slabs.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

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
  constexpr std::size_t kPage = 4096;
  const auto touch_share = [&](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(bytes, begin + share); at += kPage) {
      data[at] = std::byte{0};
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t begin = share; begin < bytes; begin += share) {
    if (fails(FaultPoint::kThreadStart)) {
      touch_share(begin);
      continue;
    }
    try {
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
  bool alive = true;
  try {
    const c10::cuda::CUDAGuard device(device_);
    alive = !in_force(WaitPoint::kSlabEnd) || cudaDeviceSynchronize() == cudaSuccess;
  } catch (...) {
    alive = false;
  }
  for (const Slab& slab : slabs_) {
    if (alive && (!pinned_ || cudaHostUnregister(slab.data) == cudaSuccess)) {
      munmap(slab.mapping, slab.mapping_bytes);
    }
  }
  static_cast<void>(cudaGetLastError());
}

std::optional<Backing::Range> HostSlabs::grow(std::size_t bytes) {
  if (bytes >= refused_bytes_ || !leaves_a_reserve(bytes)) {
    return std::nullopt;
  }
  // Two huge pages more than asked for: room to align the start, and a gap behind the end.
  const std::size_t mapping_bytes = bytes + 2 * kHugePage;
  void* const mapping = fails(FaultPoint::kPinnedAllocation) ? MAP_FAILED
                                                             : mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE,
                                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return std::nullopt;
  }
  const auto unmap = [mapping_bytes](void* mapped) { munmap(mapped, mapping_bytes); };
  std::unique_ptr<void, decltype(unmap)> owner(mapping, unmap);
  const auto start = (reinterpret_cast<std::uintptr_t>(mapping) + kHugePage - 1) / kHugePage * kHugePage;
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
  slabs_.push_back({owner.release(), mapping_bytes, data});
  return Range{static_cast<std::uint64_t>(start), bytes};
}

}  // namespace ebb
