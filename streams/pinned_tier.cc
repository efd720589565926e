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

// What is finished is settled when this many are open, so that their events come back and steady training makes none.
constexpr std::size_t kOpenTimed = 64;

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
                                        config.capacity_bytes)) {
  if (config_.trace != nullptr) {
    base_ = timed_events_.record(out_lane_);
    base_->synchronize();
    base_time_ = std::chrono::steady_clock::now();
  }
}

c10::Stream PinnedTier::current_stream() const {
  return c10::cuda::getCurrentCUDAStream(config_.device.index()).unwrap();
}

Ticket PinnedTier::record(c10::Stream stream) { return events_.record(cuda(stream)); }

void PinnedTier::make_wait(c10::Stream stream, const Ticket& ticket) {
  if (is_done(ticket) || !in_force(WaitPoint::kStreamWait)) {
    return;
  }
  const c10::cuda::CUDAStream compute = cuda(stream);
  const std::lock_guard lock(timed_mutex_);
  Ticket before = timed_events_.record(compute);
  block(compute, ticket);
  time({TraceTrack::kCompute, 0, std::move(before), timed_events_.record(compute)});
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
  const bool traced = config_.trace != nullptr;
  Ticket before = traced ? timed_events_.record(lane) : nullptr;
  C10_CUDA_CHECK(fails(FaultPoint::kCopy) ? cudaErrorInvalidValue
                                          : cudaMemcpyAsync(to, from, bytes, kind, lane.stream()));
  try {
    Ticket done = (traced ? timed_events_ : events_).record(lane);
    if (traced) {
      const std::lock_guard lock(timed_mutex_);
      time({kind == cudaMemcpyDeviceToHost ? TraceTrack::kOutLane : TraceTrack::kInLane, bytes, std::move(before),
            done});
    }
    return done;
  } catch (...) {
    // Without a ticket nobody could tell when the memory is free again, so that must be now.
    static_cast<void>(cudaStreamSynchronize(lane.stream()));
    throw;
  }
}

StallStats PinnedTier::stall_stats() const {
  const std::lock_guard lock(timed_mutex_);
  settle_finished();
  return stalls_;
}

void PinnedTier::time(Timed timed) {
  timed_.push_back(std::move(timed));
  if (timed_.size() >= kOpenTimed) {
    settle_finished();
  }
}

void PinnedTier::settle_finished() const {
  while (!timed_.empty() && is_done(timed_.front().after)) {
    const Timed& timed = timed_.front();
    const float ms = event(timed.after).ms_since(event(timed.before));
    const bool stall = timed.track == TraceTrack::kCompute;
    if (stall && ms >= kShortestStallMs) {
      ++stalls_.count;
      stalls_.total_ms += ms;
    }
    if (config_.trace != nullptr && (!stall || ms >= kShortestStallMs)) {
      add_to_trace(timed, ms);
    }
    timed_.pop_front();
  }
}

void PinnedTier::add_to_trace(const Timed& timed, float ms_long) const {
  using Ms = std::chrono::duration<double, std::milli>;
  const auto after_base = [this](double ms) {
    return base_time_ + std::chrono::duration_cast<TraceSpan::Time::duration>(Ms(ms));
  };
  const double begin = event(timed.before).ms_since(event(base_));
  const char* const name = timed.track == TraceTrack::kCompute   ? "stall"
                           : timed.track == TraceTrack::kOutLane ? "copy out"
                                                                 : "copy in";
  config_.trace->add(name, timed.track, after_base(begin), after_base(begin + ms_long), timed.bytes);
}

}  // namespace ebb
