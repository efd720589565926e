#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include <c10/cuda/CUDAStream.h>

#include "streams/base/mutex.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"
#include "streams/gpu/cuda_event.h"

namespace ebb {

// How long a GPU's streams were held up, and, if there is a trace, when its copies ran. The times are read from
// events that have passed, so nobody waits for the GPU.
//
// Threads: every member may be called from any thread.
class GpuTimes {
 public:
  // `trace`: null for none. With one, takes a stream from c10's pool and waits for an event on it: microseconds.
  GpuTimes(c10::Device device, std::shared_ptr<Trace> trace);

  // A point for `add`.
  [[nodiscard]] std::shared_ptr<const CudaEvent> record(c10::cuda::CUDAStream stream) { return events_.record(stream); }

  // A point for `add` where copies are traced; null where they are not, or where no event can be had.
  [[nodiscard]] std::shared_ptr<const CudaEvent> record_for_trace(c10::cuda::CUDAStream stream) noexcept;

  // Adds a span between two points: the stream was held up (kCompute), or copied so many bytes. The span is lost where
  // memory is short.
  void add(TraceTrack track, std::uint64_t bytes, std::shared_ptr<const CudaEvent> before,
           std::shared_ptr<const CudaEvent> after) noexcept;

  // The stalls that are over.
  [[nodiscard]] StallStats stall_stats();

  // Hands spans that are over to the trace, if there is one, and sets the host's and the GPU's clock by each other
  // anew: the clocks drift apart, and CUDA gives times as floats, which after an hour are good to a quarter of a
  // millisecond.
  void update_trace();

 private:
  struct Span {
    std::uint64_t bytes;
    std::shared_ptr<const CudaEvent> before;
    std::shared_ptr<const CudaEvent> after;
  };

  void settle_finished() noexcept EBB_REQUIRES(mutex_);
  void settle(TraceTrack track, const Span& span) EBB_REQUIRES(mutex_);

  CudaEventPool& events_;
  const std::shared_ptr<Trace> trace_;
  const std::optional<c10::cuda::CUDAStream> clock_stream_;  // with a trace. ebb gives it no other work

  Mutex mutex_;
  std::array<std::deque<Span>, kTraceTracks> open_ EBB_GUARDED_BY(mutex_);  // of each track, oldest first
  // A point whose time is known on both clocks, if there is a trace.
  std::shared_ptr<const CudaEvent> base_ EBB_GUARDED_BY(mutex_);
  TraceSpan::Time base_time_ EBB_GUARDED_BY(mutex_);
  StallStats stalls_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
