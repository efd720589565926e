#include "streams/gpu/gpu_times.h"

#include <chrono>
#include <utility>

namespace ebb {
namespace {

// Two events in a row on an idle stream lie a few microseconds apart; a shorter wait than this is no stall.
constexpr float kShortestStallMs = 0.02F;

// Spans that are over are settled when a track has this many spans, so that their events return to the pool, and steady
// training makes no new events.
constexpr std::size_t kOpenSpans = 64;

const char* name(TraceTrack track) {
  return track == TraceTrack::kCompute ? "stall" : track == TraceTrack::kOutLane ? "copy out" : "copy in";
}

TraceSpan::Time::duration duration(double ms) {
  return std::chrono::duration_cast<TraceSpan::Time::duration>(std::chrono::duration<double, std::milli>(ms));
}

}  // namespace

GpuTimes::GpuTimes(c10::Device device, std::shared_ptr<Trace> trace)
    : events_(CudaEventPool::of(device, CudaEventPool::Timing::kOn)),
      trace_(std::move(trace)),
      clock_stream_(trace_ == nullptr
                        ? std::nullopt
                        : std::optional(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()))) {
  update_trace();
}

std::shared_ptr<const CudaEvent> GpuTimes::record_for_trace(c10::cuda::CUDAStream stream) noexcept {
  try {
    return trace_ == nullptr ? nullptr : record(stream);
  } catch (...) {
    return nullptr;
  }
}

void GpuTimes::add(TraceTrack track, std::uint64_t bytes, std::shared_ptr<const CudaEvent> before,
                   std::shared_ptr<const CudaEvent> after) noexcept {
  const MutexLock lock(mutex_);
  std::deque<Span>& open = open_.at(static_cast<std::size_t>(track));
  try {
    open.push_back({bytes, std::move(before), std::move(after)});
  } catch (...) {
    return;
  }
  if (open.size() >= kOpenSpans) {
    settle_finished();
  }
}

StallStats GpuTimes::stall_stats() {
  const MutexLock lock(mutex_);
  settle_finished();
  return stalls_;
}

void GpuTimes::update_trace() {
  if (trace_ == nullptr) {
    return;
  }
  const MutexLock lock(mutex_);
  settle_finished();
  auto base = record(*clock_stream_);
  base->synchronize();
  base_time_ = std::chrono::steady_clock::now();
  base_ = std::move(base);
}

void GpuTimes::settle_finished() noexcept {
  for (std::size_t track = 0; track < open_.size(); ++track) {
    std::deque<Span>& open = open_.at(track);
    while (!open.empty() && open.front().after->done()) {
      const Span span = std::move(open.front());
      open.pop_front();
      try {
        settle(static_cast<TraceTrack>(track), span);
      } catch (...) {  // no memory for the span, or the device has failed, which the work itself will report
      }
    }
  }
}

void GpuTimes::settle(TraceTrack track, const Span& span) {
  const float ms = span.after->ms_since(*span.before);
  if (track == TraceTrack::kCompute) {
    if (ms < kShortestStallMs) {
      return;
    }
    ++stalls_.count;
    stalls_.total_ms += ms;
  }
  if (trace_ != nullptr) {
    const TraceSpan::Time begin = base_time_ + duration(span.before->ms_since(*base_));
    trace_->add(name(track), track, begin, begin + duration(ms), span.bytes);
  }
}

}  // namespace ebb
