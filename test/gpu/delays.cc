#include "test/gpu/delays.h"

#include <cstdint>
#include <cstdlib>
#include <limits>

#include <ATen/Functions.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "test/checked/checked_tier.h"

namespace ebb::test {
namespace {

constexpr std::int64_t kSpinCycles = 100'000'000;  // 50 ms at 2 GHz
constexpr std::int64_t kClogBytes = std::int64_t{256} << 20;
constexpr int kClogCopies = 8;  // 40 ms at 54 GB/s

// By default all streams of a process share eight queues to the device, and one that waits may hold up another that has
// nothing to wait for: a missing wait would not show. CUDA reads this when it starts, so it is set before main.
const bool kQueueForEachStream = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/1) == 0;

c10::cuda::CUDAStream new_stream() { return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, 0); }

at::TensorOptions bytes_on_gpu() { return at::TensorOptions().device(c10::kCUDA, 0).dtype(at::kByte); }

Ticket behind_a_spinning_kernel(PinnedTier& tier) {
  static const c10::cuda::CUDAStream stream = new_stream();
  const c10::cuda::CUDAStreamGuard guard(stream);
  spin();
  return tier.record(stream.unwrap());
}

}  // namespace

c10::cuda::CUDAStream other_stream() {
  static const c10::cuda::CUDAStream stream = new_stream();
  return stream;
}

void spin() { at::cuda::sleep(kSpinCycles); }

void clog(cudaMemcpyKind direction) {
  // They outlive CUDA.
  static auto* const device = new at::Tensor(at::empty({kClogBytes}, bytes_on_gpu()));
  static auto* const host =
      new at::Tensor(at::empty({kClogBytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)));
  static const c10::cuda::CUDAStream out = new_stream();
  static const c10::cuda::CUDAStream in = new_stream();
  const bool outward = direction == cudaMemcpyDeviceToHost;
  for (int i = 0; i < kClogCopies; ++i) {
    C10_CUDA_CHECK(cudaMemcpyAsync((outward ? host : device)->mutable_data_ptr(),
                                   (outward ? device : host)->const_data_ptr(), kClogBytes, direction,
                                   (outward ? out : in).stream()));
  }
}

LaneHold::LaneHold(PinnedTier& tier)
    : tier_(tier), block_(tier.try_acquire(kBytes).value()), memory_(at::empty({kBytes}, bytes_on_gpu())) {
  // A stream's first copy may take CUDA longer.
  tier_.copy_out(block_, memory_.const_data_ptr(), {});
  tier_.copy_in(memory_.mutable_data_ptr(), block_, {});
}

LaneHold::~LaneHold() { static_cast<void>(cudaDeviceSynchronize()); }

void LaneHold::hold_out() {
  clog(cudaMemcpyDeviceToHost);
  tier_.copy_out(block_, memory_.const_data_ptr(), {WaitPoint::kCaller, behind_a_spinning_kernel(tier_)});
}

void LaneHold::hold_in() {
  clog(cudaMemcpyHostToDevice);
  tier_.copy_in(memory_.mutable_data_ptr(), block_, {WaitPoint::kCaller, behind_a_spinning_kernel(tier_)});
}

void start_afresh() {
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  observe_gone(nullptr, std::numeric_limits<std::size_t>::max());
}

}  // namespace ebb::test
