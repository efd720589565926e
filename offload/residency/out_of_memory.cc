#include "offload/residency/out_of_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAMacros.h>

#include "offload/device_meter.h"
#include "offload/report/gauge.h"
#include "offload/residency/residency.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

// The offloaders that are asked for device memory.
class Served {
 public:
  static Served& all() {
    static auto* const served = new Served;  // the allocator may ask at any time, also at exit
    return *served;
  }

  void add(const std::shared_ptr<Residency>& residency) {
    const MutexLock lock(mutex_);
    std::erase_if(offloaders_, [](const auto& each) { return each.expired(); });
    offloaders_.push_back(residency);
    any_ = true;
  }

  [[nodiscard]] std::vector<std::shared_ptr<Residency>> on(c10::Device device) {
    std::vector<std::shared_ptr<Residency>> found;
    if (!any_) {
      return found;
    }
    {
      const MutexLock lock(mutex_);
      for (const auto& each : offloaders_) {
        found.push_back(each.lock());
      }
    }
    // The lock is released: the last reference may end here, and with it a whole Residency.
    std::erase_if(found, [device](const std::shared_ptr<Residency>& residency) {
      return residency == nullptr || residency->forked() || residency->tier().device() != device;
    });
    return found;
  }

 private:
  std::atomic<bool> any_{false};
  Mutex mutex_;
  std::vector<std::weak_ptr<Residency>> offloaders_ EBB_GUARDED_BY(mutex_);
};

// The largest request that each device has granted since request sizes are learnt.
std::array<std::atomic<std::uint64_t>, C10_COMPILE_TIME_MAX_GPUS> largest_granted_bytes;

void note_granted_request(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  if (entry.action_ == c10::CachingDeviceAllocator::TraceEntry::ALLOC) {
    raise_to(largest_granted_bytes.at(static_cast<std::size_t>(entry.device_)), entry.size_);
  }
}

void note_failed_request(std::int64_t index, std::size_t bytes, std::size_t /*total*/, std::size_t /*free*/) {
  if (Residency::prefetches_here()) {  // backward can do without a prefetch
    return;
  }
  try {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    const std::uint64_t room = cuda_headroom(device).unsplit_bytes;
    for (const std::shared_ptr<Residency>& residency : Served::all().on(device)) {
      if (bytes <= room + residency->evictable_bytes()) {
        residency->ledger().expect_request(bytes);
      }
    }
  } catch (...) {  // the caller is about to throw c10::OutOfMemoryError
  }
}

// How many bytes must be let go so that the device can give `reserve` bytes to one request.
std::uint64_t bytes_short_of(std::uint64_t reserve, c10::Device device) {
  const std::uint64_t bytes = bytes_short(cuda_headroom(device).unsplit_bytes, reserve);
  return bytes > 0 || !uses_expandable_segments() ? bytes : bytes_short(cuda_unsplit_bytes_by_pages(device), reserve);
}

// Has the offloaders on the current device let go of memory. Returns whether any memory was let go.
bool make_room() {
  const c10::Device device(c10::kCUDA, c10::cuda::current_device());
  const std::vector<std::shared_ptr<Residency>> offloaders = Served::all().on(device);
  if (offloaders.empty() || c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return false;
  }
  std::uint64_t reserve = largest_granted_bytes.at(static_cast<std::size_t>(device.index()));
  for (const std::shared_ptr<Residency>& residency : offloaders) {
    reserve = std::max(reserve, residency->ledger().largest_request_bytes());
  }
  bool some = false;
  for (const std::shared_ptr<Residency>& residency : offloaders) {
    // Memory that was let go may lie in holes beside memory in use, which serve no large request. So the headroom is
    // asked for again.
    while (const std::uint64_t bytes = bytes_short_of(reserve, device)) {
      if (residency->evict(bytes) == 0) {
        break;
      }
      some = true;
    }
  }
  return some;
}

class MakeRoom final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {  // NOLINT(readability-identifier-naming): LibTorch's name
    try {
      return make_room();
    } catch (...) {  // the allocator then goes on as if no memory could be let go
      return false;
    }
  }
};

}  // namespace
}  // namespace ebb

namespace c10 {

// Registered when the program starts, because the registry has no lock.
using ebb::MakeRoom;
REGISTER_FREE_MEMORY_CALLBACK(ebb_make_room, MakeRoom)

}  // namespace c10

namespace ebb {

std::uint64_t bytes_short(std::uint64_t room, std::uint64_t reserve) {
  constexpr std::uint64_t kSmallest = 20 << 20;  // the segment that LibTorch takes for a request of 1 to 10 MiB
  constexpr std::uint64_t kUnit = 2 << 20;       // LibTorch rounds larger segments up to a multiple of this
  const std::uint64_t segment = std::max((reserve + kUnit - 1) / kUnit * kUnit, kSmallest);
  return segment - std::min(room, segment);
}

void serve_when_out_of_memory(const std::shared_ptr<Residency>& residency) {
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  if (allocator->name() != "native") {  // cudaMallocAsync and allocators of the user's never ask
    return;
  }
  static std::once_flag once;
  std::call_once(once, [allocator] {
    allocator->init(c10::cuda::device_count());  // a device that is not initialised yet reports nothing
    allocator->attachOutOfMemoryObserver(&note_failed_request);
  });
  Served::all().add(residency);
}

void learn_request_sizes() {
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  if (allocator->name() != "native") {
    return;
  }
  static std::once_flag once;
  std::call_once(once, [allocator] {
    allocator->init(c10::cuda::device_count());
    allocator->attachAllocatorTraceTracker(&note_granted_request);
  });
}

}  // namespace ebb
