#include "bench/common/device_buffer.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

namespace ebb {

DeviceBuffer::DeviceBuffer(c10::Device device, std::size_t bytes) : device_(device) {
  const c10::cuda::CUDAGuard guard(device_);
  void* data = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&data, bytes));
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::~DeviceBuffer() {
  try {
    const c10::cuda::CUDAGuard guard(device_);
    static_cast<void>(cudaDeviceSynchronize());
    static_cast<void>(cudaFree(data_));
  } catch (...) {  // the guard's: CUDA is gone, and the memory with it
  }
}

}  // namespace ebb
