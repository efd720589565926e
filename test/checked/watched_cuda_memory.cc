#include "test/checked/watched_cuda_memory.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/env.h>

#include "streams/base/mutex.h"

namespace ebb {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Action = allocator::TraceEntry::Action;

class Actors {
 public:
  HappensBefore::Actor of(c10::DeviceIndex device, cudaStream_t stream) {
    const MutexLock lock(mutex_);
    const auto [at, is_new] = actors_.try_emplace({device, stream}, HappensBefore::kHost);
    if (is_new) {
      at->second = HappensBefore::instance().make_actor("stream " + std::to_string(actors_.size()) + " of GPU " +
                                                        std::to_string(device));
    }
    return at->second;
  }

 private:
  Mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, cudaStream_t>, HappensBefore::Actor> actors_ EBB_GUARDED_BY(mutex_);
};

Actors& actors() {
  static auto* const actors = new Actors;  // memory is freed until the process has ended
  return *actors;
}

// The call to the allocator that made an entry of its history.
struct Call final : c10::GatheredContext {
  const std::uint64_t number = next_++;

 private:
  static inline std::atomic<std::uint64_t> next_{1};
};

std::shared_ptr<c10::GatheredContext> new_call() { return std::make_shared<Call>(); }

std::uint64_t call_of(const allocator::TraceEntry& entry) {
  const auto* const call = dynamic_cast<const Call*>(entry.context_.get());
  return call == nullptr ? 0 : call->number;
}

// The allocator holds its lock meanwhile: nothing here may call it.
void watch(const allocator::TraceEntry& entry) {
  thread_local std::uint64_t requested_by = 0;
  const HappensBefore::Range range{HappensBefore::kDevice, entry.addr_, entry.size_};
  switch (entry.action_) {
    case Action::FREE_REQUESTED:
      requested_by = call_of(entry);
      break;
    case Action::FREE_COMPLETED: {
      const HappensBefore::Actor stream = actors().of(entry.device_, static_cast<cudaStream_t>(entry.stream_));
      const auto behind =
          call_of(entry) == requested_by ? HappensBefore::Behind::kItself : HappensBefore::Behind::kAllStreams;
      HappensBefore::instance().access(stream, HappensBefore::Kind::kFree, range, behind);
      break;
    }
    case Action::SEGMENT_FREE:
    case Action::SEGMENT_UNMAP:
      HappensBefore::instance().forget(range);
      break;
    default:
      break;
  }
}

}  // namespace

HappensBefore::Actor actor_of(c10::cuda::CUDAStream stream) {
  return actors().of(stream.device_index(), stream.stream());
}

void watch_cuda_allocator() {
  static const bool watched = [] {
    allocator::init(c10::cuda::device_count());  // an allocator that is not initialized cannot be watched
    allocator::attachAllocatorTraceTracker(&watch);
    // Recording is on for the entries' contexts alone; a history of one entry suffices.
    allocator::recordHistory(/*enabled=*/true, &new_call, /*alloc_trace_max_entries=*/1, allocator::RecordContext::ALL,
                             /*clearHistory=*/false, /*skip_actions=*/{});
    return true;
  }();
  static_cast<void>(watched);
}

void forget_former_memory(const void* data, std::size_t bytes) {
  static const bool cached = !c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING");
  if (!cached) {
    HappensBefore::instance().forget({HappensBefore::kDevice, reinterpret_cast<std::uintptr_t>(data), bytes});
  }
}

}  // namespace ebb
