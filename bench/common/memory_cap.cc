#include "bench/common/memory_cap.h"

#include <cstddef>
#include <stdexcept>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include "offload/base/human_bytes.h"

namespace ebb {

void cap_memory(std::uint64_t cap_bytes, c10::Device device) {
  at::globalContext().lazyInitDevice(c10::kCUDA);  // or LibTorch's allocator knows no device until the first tensor
  const c10::cuda::CUDAGuard guard(device);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (cap_bytes > total_bytes) {
    throw std::invalid_argument("a cap of " + human_bytes(cap_bytes) + " is more than the device's " +
                                human_bytes(total_bytes));
  }
  c10::cuda::CUDACachingAllocator::setMemoryFraction(static_cast<double>(cap_bytes) / static_cast<double>(total_bytes),
                                                     device.index());
}

}  // namespace ebb
