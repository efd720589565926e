#include "offload/saving/out_of_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAMacros.h>

#include "offload/accounts/gauge.h"
#include "offload/base/references.h"
#include "offload/device_meter.h"
#include "offload/saving/runtime.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

// The offloaders that are asked for device memory.
class Served {
 public:
  static Served& all() { return PerProcess<Served>::here(); }

  void add(const std::shared_ptr<Runtime>& runtime) {
    const MutexLock lock(mutex_);
    std::erase_if(offloaders_, [](const auto& each) { return each.expired(); });
    offloaders_.push_back(runtime);
  }

  [[nodiscard]] std::vector<std::shared_ptr<Runtime>> on(c10::Device device) {
    std::vector<std::shared_ptr<Runtime>> found;
    {
      const MutexLock lock(mutex_);
      for (const auto& each : offloaders_) {
        found.push_back(each.lock());
      }
    }
    // The lock is released: the last reference may end here, and with it a whole Runtime.
    std::erase_if(found, [device](const std::shared_ptr<Runtime>& runtime) {
      return runtime == nullptr || runtime->forked() || runtime->tier().device() != device;
    });
    return found;
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<Runtime>> offloaders_ EBB_GUARDED_BY(mutex_);
};

// The largest request that each device has granted since request sizes are learnt.
std::array<std::atomic<std::uint64_t>, C10_COMPILE_TIME_MAX_GPUS> largest_granted_bytes;

// Called under the allocator's lock, for each event of a block.
void note_granted_request(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  const auto device = static_cast<std::size_t>(entry.device_);
  const bool is_request = entry.action_ == c10::CachingDeviceAllocator::TraceEntry::ALLOC &&
                          entry.mempool_ == c10::MempoolId_t{0, 0};  // not of a CUDA graph's pool
  if (is_request && device < largest_granted_bytes.size()) {
    raise_to(largest_granted_bytes[device], entry.size_);
  }
}

// Whether the process has been granted memory on this device alone, since request sizes are learnt.
bool is_only_device_in_use(c10::Device device) {
  for (std::size_t i = 0; i < largest_granted_bytes.size(); ++i) {
    if ((largest_granted_bytes[i] > 0) != (i == static_cast<std::size_t>(device.index()))) {
      return false;
    }
  }
  return true;
}

void note_failed_request(std::int64_t index, std::size_t bytes, std::size_t /*total*/, std::size_t /*free*/) {
  if (Prefetching::is_here()) {  // backward can do without a prefetch
    return;
  }
  try {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    const std::uint64_t room = cuda_headroom(device).unsplit_bytes;
    for (const std::shared_ptr<Runtime>& runtime : Served::all().on(device)) {
      if (bytes <= room + runtime->evictable_bytes()) {
        runtime->residency().ledger().expect_request(bytes);
      }
    }
  } catch (...) {  // the caller is about to throw c10::OutOfMemoryError
  }
}

// How many bytes must be let go so that the device can give `reserve` bytes to one request. Called under the
// allocator's lock of this device, which may be waited for by a thread with another's: see
// cuda_unsplit_bytes_by_pages().
std::uint64_t bytes_short_of(std::uint64_t reserve, c10::Device device) {
  const DeviceHeadroom headroom = cuda_headroom(device);
  const std::uint64_t bytes = bytes_short(headroom.unsplit_bytes, reserve);
  const bool is_known = bytes > 0 || bytes_short(headroom.untaken_bytes, reserve) == 0;
  if (is_known || !uses_expandable_segments() || !is_only_device_in_use(device)) {
    return bytes;
  }
  return bytes_short(cuda_unsplit_bytes_by_pages(device), reserve);
}

// The largest request for which the device is to be held ready.
std::uint64_t reserve_for(const std::vector<std::shared_ptr<Runtime>>& offloaders, c10::Device device) {
  std::uint64_t expected = 0;
  std::uint64_t evictable = 0;
  bool manages = false;
  for (const std::shared_ptr<Runtime>& runtime : offloaders) {
    expected = std::max(expected, runtime->residency().ledger().largest_request_bytes());
    evictable += runtime->evictable_bytes();
    manages = manages || runtime->managed() != nullptr;
  }
  std::atomic<std::uint64_t>& granted = largest_granted_bytes.at(static_cast<std::size_t>(device.index()));
  if (!manages) {
    granted = std::min<std::uint64_t>(granted, 1);  // of storages that nobody manages any more
  }
  // More than all that ebb holds cannot be had.
  return granted <= cuda_headroom(device).unsplit_bytes + evictable ? std::max<std::uint64_t>(expected, granted)
                                                                    : expected;
}

// Has the offloaders on the current device let go of memory. Returns whether any memory was let go.
bool make_room() {
  const c10::Device device(c10::kCUDA, c10::cuda::current_device());
  const std::vector<std::shared_ptr<Runtime>> offloaders = Served::all().on(device);
  if (offloaders.empty() || c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return false;
  }
  const std::uint64_t reserve = reserve_for(offloaders, device);
  bool some = false;
  for (const std::shared_ptr<Runtime>& runtime : offloaders) {
    // Memory that was let go may lie in holes beside memory in use, which serve no large request. So the headroom is
    // asked for again.
    while (const std::uint64_t bytes = bytes_short_of(reserve, device)) {
      if (runtime->evict(bytes) == 0) {
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
    bool some = false;
    holds_allocators_lock = true;
    try {
      some = make_room();
    } catch (...) {  // the allocator then goes on as if no memory could be let go
    }
    holds_allocators_lock = false;
    return some;
  }
};

// LibTorch's own allocator, ready to be listened to; null for others (cudaMallocAsync and the user's), which never ask.
c10::cuda::CUDACachingAllocator::CUDAAllocator* allocator_that_asks() {
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  if (allocator->name() != "native") {
    return nullptr;
  }
  static std::once_flag once;
  std::call_once(once, [allocator] { allocator->init(c10::cuda::device_count()); });  // else devices report nothing
  return allocator;
}

}  // namespace

std::uint64_t bytes_short(std::uint64_t room, std::uint64_t reserve) {
  constexpr std::uint64_t kSmallest = 20 << 20;  // the segment that LibTorch takes for a request of 1 to 10 MiB
  constexpr std::uint64_t kUnit = 2 << 20;       // LibTorch rounds larger segments up to a multiple of this
  const std::uint64_t segment = std::max((reserve + kUnit - 1) / kUnit * kUnit, kSmallest);
  return segment - std::min(room, segment);
}

void serve_when_out_of_memory(const std::shared_ptr<Runtime>& runtime) {
  if (auto* const allocator = allocator_that_asks()) {
    static std::once_flag once;
    std::call_once(once, [allocator] { allocator->attachOutOfMemoryObserver(&note_failed_request); });
    Served::all().add(runtime);
  }
}

void learn_request_sizes() {
  if (auto* const allocator = allocator_that_asks()) {
    static std::once_flag once;
    std::call_once(once, [allocator] { allocator->attachAllocatorTraceTracker(&note_granted_request); });
  }
}

}  // namespace ebb

namespace c10 {

// Registered when the program starts, because the registry has no lock.
using ebb::MakeRoom;
REGISTER_FREE_MEMORY_CALLBACK(ebb_make_room, MakeRoom)

}  // namespace c10
