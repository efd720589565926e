#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include "streams/base/after.h"
#include "streams/base/mutex.h"
#include "streams/gpu/copy_batch.h"
#include "streams/gpu/cuda_event.h"
#include "streams/gpu/gpu_times.h"

namespace ebb {

// The copies of one direction between a GPU and host memory: on a side stream, small ones in batches, or on whatever
// stream is current, each by itself.
//
// Threads: every member may be called from any thread; copies that two threads ask for are queued one after the other.
class CopyLane {
 public:
  enum class How : std::uint8_t {
    kOnCurrentStream,
    kOnSideStream,
    kBatched,  // on a side stream, small ones in batches: needs pinned memory
  };

  CopyLane(c10::Device device, cudaMemcpyKind kind, How how, std::shared_ptr<GpuTimes> times);

  // Starts a copy behind all of `after`, and returns the ticket of its end: see Note [Batches]. Errors as Tier.
  [[nodiscard]] Ticket copy(void* to, const void* from, std::size_t bytes, const After& after);

  // Queues the open batch, if there is one.
  void flush() noexcept;

 private:
  using Gates = c10::SmallVector<std::shared_ptr<const CudaEvent>, 4>;

  [[nodiscard]] Gates gates(const After& after) const EBB_EXCLUDES(mutex_);
  void close_batch() noexcept EBB_REQUIRES(mutex_);

  const c10::Device device_;
  const cudaMemcpyKind kind_;
  const How how_;
  const std::optional<c10::cuda::CUDAStream> side_stream_;  // unless kOnCurrentStream
  const std::shared_ptr<GpuTimes> times_;

  Mutex mutex_;                                              // held while copies are queued
  std::shared_ptr<CopyBatch> batch_ EBB_GUARDED_BY(mutex_);  // the last one, for small copies to join
};

// The event that a ticket stands for; null if there is nothing left to wait for. Queues a ticket's
// batch; waits for a ticket that is not a GPU's. Throws the error of either.
[[nodiscard]] std::shared_ptr<const CudaEvent> event_of(const Ticket& ticket);

}  // namespace ebb
