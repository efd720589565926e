#include "streams/cuda_event.h"

#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace ebb {

Ticket CudaEventPool::record(c10::cuda::CUDAStream stream) {
  return std::make_shared<const CudaEvent>(shared_from_this(), stream);
}

cudaEvent_t CudaEventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  const c10::cuda::CUDAGuard device(device_);
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, timing_ == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming));
  return event;
}

void CudaEventPool::give_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    free_.push_back(event);
  } catch (...) {  // no memory for the list: this one event is lost
  }
}

CudaEvent::CudaEvent(std::shared_ptr<CudaEventPool> pool, c10::cuda::CUDAStream stream)
    : pool_(std::move(pool)), event_(pool_->take()) {
  const c10::cuda::CUDAGuard device(stream.device());
  const cudaError_t error = cudaEventRecord(event_, stream.stream());
  if (error != cudaSuccess) {
    pool_->give_back(event_);
    C10_CUDA_CHECK(error);
  }
}

CudaEvent::~CudaEvent() { pool_->give_back(event_); }

bool CudaEvent::done() const {
  const cudaError_t error = cudaEventQuery(event_);
  if (error == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // "not ready" is an answer; left in place, the next check would report it
    return false;
  }
  C10_CUDA_CHECK(error);
  return true;
}

void CudaEvent::synchronize() const { C10_CUDA_CHECK(cudaEventSynchronize(event_)); }

void CudaEvent::block(c10::cuda::CUDAStream stream) const {
  const c10::cuda::CUDAGuard device(stream.device());
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event_, 0));
}

float CudaEvent::ms_since(const CudaEvent& earlier) const {
  float ms = 0;
  C10_CUDA_CHECK(cudaEventElapsedTime(&ms, earlier.event_, event_));
  return ms;
}

}  // namespace ebb
