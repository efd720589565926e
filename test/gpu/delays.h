#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "streams/base/block_pool.h"
#include "streams/gpu/copy_batch.h"
#include "streams/gpu/pinned_tier.h"

// Delays on a GPU for tests of order: each lasts some tens of milliseconds, far longer than the host takes to queue all
// that a test does meanwhile, so that work which should wait, and does not, comes first every time.
//
// Threads: one at a time.
namespace ebb::test {

// Not the default stream, always the same, and of high priority: tiers take their lanes from c10's pool of streams of
// normal priority, so this is never one of them.
[[nodiscard]] c10::cuda::CUDAStream other_stream();

// A kernel on the current stream that spins.
void spin();

// Copies of large pinned memory that keep the device's engine for one direction busy, on a stream of their own.
// `direction`: cudaMemcpyDeviceToHost or cudaMemcpyHostToDevice.
void clog(cudaMemcpyKind direction);

// Holds up one lane of a tier: the copies that it is asked for next stand behind one that waits for a spinning kernel
// on a stream of its own. No compute stream is held up. Of use only where copies are overlapped: else there are no
// lanes.
class LaneHold {
 public:
  // Of the tier's host memory. Copies of so many are queued at once.
  static constexpr std::size_t kBytes = 2 * CopyBatch::kLargestCopy;

  explicit LaneHold(PinnedTier& tier);

  // Waits for the device.
  ~LaneHold();
  LaneHold(const LaneHold&) = delete;
  LaneHold& operator=(const LaneHold&) = delete;

  void hold_out();
  void hold_in();

 private:
  PinnedTier& tier_;
  const Block block_;
  const at::Tensor memory_;
};

// Waits for the device, and gives back what LibTorch's allocator has cached, so that memory which is freed from here on
// is what is allocated next. The check of order knows of no such wait and forgets all device memory: what was done to
// it is over.
void start_afresh();

}  // namespace ebb::test
