#include "streams/pinned_tier.h"

#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "streams/fault_point.h"
#include "streams/host_slabs.h"

namespace ebb {
namespace {

// Two events in a row on an idle stream lie a few microseconds apart; what is shorter than this is no stall.
constexpr float kShortestStallMs = 0.02F;

// Finished stalls are added up when this many are open, so that their events come back and steady training makes none.
constexpr std::size_t kOpenStalls = 64;

const CudaEvent& event(const Ticket& ticket) { return static_cast<const CudaEvent&>(*ticket); }

c10::cuda::CUDAStream cuda(c10::Stream stream) { return c10::cuda::CUDAStream(stream); }

void block(c10::cuda::CUDAStream stream, const Ticket& ticket) {
  if (ticket == nullptr) {
    return;
  }
  if (const auto* on_gpu = dynamic_cast<const CudaEvent*>(ticket.get())) {
    on_gpu->block(stream);
  } else {
    ticket->synchronize();  // a ticket of some other kind of queue: only the host can wait for it
  }
}

}  // namespace

PinnedTier::PinnedTier(const Config& config)
    : config_(config),
      out_lane_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, config.device.index())),
      in_lane_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, config.device.index())),
      events_(CudaEventPool::of(config.device, CudaEventPool::Timing::kOff)),
      timed_events_(CudaEventPool::of(config.device, CudaEventPool::Timing::kOn)),
      pool_(std::make_shared<BlockPool>(std::make_unique<HostSlabs>(config.device, config.pinned),
                                        config.capacity_bytes)) {}

c10::Stream PinnedTier::current_stream() const {
  return c10::cuda::getCurrentCUDAStream(config_.device.index()).unwrap();
}

Ticket PinnedTier::record(c10::Stream stream) { return events_.record(cuda(stream)); }

void PinnedTier::make_wait(c10::Stream stream, const Ticket& ticket) {
  if (is_done(ticket) || !in_force(WaitPoint::kStreamWait)) {
    return;
  }
  const c10::cuda::CUDAStream compute = cuda(stream);
  const std::lock_guard lock(stall_mutex_);
  Ticket before = timed_events_.record(compute);
  block(compute, ticket);
  open_stalls_.push_back({std::move(before), timed_events_.record(compute)});
  if (open_stalls_.size() >= kOpenStalls) {
    add_up_finished_stalls();
  }
}

c10::DataPtr PinnedTier::allocate(std::size_t bytes) {
  const c10::cuda::CUDAGuard device(config_.device);
  TORCH_CHECK_WITH(OutOfMemoryError, !fails(FaultPoint::kDeviceAllocation), "cannot allocate ", bytes,
                   " bytes of device memory to copy back to");
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

Ticket PinnedTier::copy_out(const Block& to, const void* from, const After& after) {
  return copy(out_lane_, to.data(), from, to.size(), cudaMemcpyDeviceToHost, after);
}

Ticket PinnedTier::copy_in(void* to, const Block& from, const After& after) {
  return copy(in_lane_, to, from.data(), from.size(), cudaMemcpyHostToDevice, after);
}

Ticket PinnedTier::copy(c10::cuda::CUDAStream lane, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                        const After& after) {
  const c10::cuda::CUDAGuard device(config_.device);
  if (!config_.overlapped) {
    lane = c10::cuda::getCurrentCUDAStream(config_.device.index());
  }
  for (const Ticket& ticket : after.tickets()) {
    if (in_force(WaitPoint::kLaneGates)) {
      block(lane, ticket);
    }
  }
  C10_CUDA_CHECK(fails(FaultPoint::kCopy) ? cudaErrorInvalidValue
                                          : cudaMemcpyAsync(to, from, bytes, kind, lane.stream()));
  try {
    return events_.record(lane);
  } catch (...) {
    // Without a ticket nobody could tell when the memory is free again, so that must be now.
    static_cast<void>(cudaStreamSynchronize(lane.stream()));
    throw;
  }
}

StallStats PinnedTier::stall_stats() const {
  const std::lock_guard lock(stall_mutex_);
  add_up_finished_stalls();
  return stalls_;
}

void PinnedTier::add_up_finished_stalls() const {
  while (!open_stalls_.empty() && is_done(open_stalls_.front().after)) {
    const Stall& stall = open_stalls_.front();
    const float ms = event(stall.after).ms_since(event(stall.before));
    if (ms >= kShortestStallMs) {
      ++stalls_.count;
      stalls_.total_ms += ms;
    }
    open_stalls_.pop_front();
  }
}

}  // namespace ebb
