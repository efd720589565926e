#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include "streams/base/mutex.h"
#include "streams/base/ticket.h"
#include "streams/gpu/cuda_event.h"
#include "streams/gpu/gpu_times.h"

namespace ebb {

// Copies of one direction that are queued together, and the one ticket that they share.
//
// Note [Batches]
// A copy costs an H200's link 2 to 3 us besides its bytes: one after another, copies of 64 KiB reach 17 GB/s, and
// copies of 4 KiB reach 2. Eight in one cudaMemcpyBatchAsync reach 44 and 11, and cost the host 0.8 us each instead
// of 1.9. So a small copy joins a batch instead of being queued at once. A batch is queued when it is full, when a copy
// comes that cannot join it, when the tier is flushed, and, so that no wait can be in vain, as soon as anybody waits
// for the batch's ticket. The waits of the copies are gathered, too: the lane waits once for each event, and for one
// point of their compute stream, taken when the batch is queued. A large copy is a batch of its own.
//
// Threads: every member may be called from any thread.
class CopyBatch final : public Completion {
 public:
  static constexpr std::size_t kLargestCopy = std::size_t{256} << 10;  // larger ones are queued by themselves
  static constexpr std::size_t kMostCopies = 128;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;  // a batch with so many is queued

  // A batch on the stream `lane` of up to `copies` copies, all behind `streams`. More than one copy needs pinned
  // memory, and a lane that is not CUDA's default stream.
  CopyBatch(c10::cuda::CUDAStream lane, cudaMemcpyKind kind, std::size_t copies, std::span<const c10::Stream> streams,
            std::shared_ptr<GpuTimes> times);
  CopyBatch(const CopyBatch&) = delete;
  CopyBatch& operator=(const CopyBatch&) = delete;

  using Gates = std::span<const std::shared_ptr<const CudaEvent>>;

  // Adds a copy behind `gates` and behind the work that the streams have been given by now. False, and nothing is done,
  // if the batch has been queued or is for other streams. The copy that fills the batch queues it.
  [[nodiscard]] bool add(void* to, const void* from, std::size_t bytes, Gates gates,
                         std::span<const c10::Stream> streams);

  // Queues the copies, unless they are queued: one by one, if CUDA refuses the batch. Returns the point after them, or
  // null if that point is known to be reached. Throws, at every call, the error for which they could not be queued.
  std::shared_ptr<const CudaEvent> queued() const;

  // False until the copies are queued. Does not queue them.
  [[nodiscard]] bool done() const noexcept override;
  void synchronize() const override;

 private:
  struct Copies {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> sizes;
    std::vector<std::shared_ptr<const CudaEvent>> gates;
    std::uint64_t bytes = 0;
  };

  void queue_locked() const noexcept EBB_REQUIRES(mutex_);
  void queue_copies() const EBB_REQUIRES(mutex_);
  void pass_gates() const EBB_REQUIRES(mutex_);
  void hand_over() const EBB_REQUIRES(mutex_);

  const c10::cuda::CUDAStream lane_;
  const cudaMemcpyKind kind_;
  const std::size_t most_copies_;
  const c10::SmallVector<c10::Stream, 1> streams_;
  CudaEventPool& events_;
  const std::shared_ptr<GpuTimes> times_;

  mutable Mutex mutex_;
  mutable std::unique_ptr<Copies> open_ EBB_GUARDED_BY(mutex_);  // null once they are queued
  mutable std::atomic<bool> is_queued_{false};                   // from then on the two members below are fixed
  mutable std::shared_ptr<const CudaEvent> done_;  // null before, and if the point is reached or the copies have failed
  mutable std::exception_ptr error_;               // null unless the copies could not be queued
};

}  // namespace ebb
