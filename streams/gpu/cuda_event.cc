#include "streams/gpu/cuda_event.h"

#include <map>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "streams/base/fault_point.h"

namespace ebb {

CudaEventPool& CudaEventPool::of(c10::Device device, Timing timing) {
  using Pools = std::map<std::pair<c10::DeviceIndex, Timing>, std::unique_ptr<CudaEventPool>>;
  static Mutex mutex;
  static auto* const pools EBB_PT_GUARDED_BY(mutex) = new Pools;  // Note [Events are never destroyed]
  const MutexLock lock(mutex);
  std::unique_ptr<CudaEventPool>& pool = (*pools)[{device.index(), timing}];
  if (pool == nullptr) {
    pool.reset(new CudaEventPool(device, timing));
  }
  return *pool;
}

std::shared_ptr<const CudaEvent> CudaEventPool::record(c10::cuda::CUDAStream stream) {
  return std::make_shared<const CudaEvent>(*this, stream);
}

cudaEvent_t CudaEventPool::take() {
  C10_CUDA_CHECK(fails(FaultPoint::kEventCreation) ? cudaErrorMemoryAllocation : cudaSuccess);
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  const c10::cuda::CUDAGuard device(device_);
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, timing_ == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming));
  ++made_;
  return event;
}

void CudaEventPool::give_back(cudaEvent_t event) noexcept {
  const MutexLock lock(mutex_);
  try {
    free_.push_back(event);
  } catch (...) {  // no memory for the list: this one event is lost
  }
}

CudaEvent::CudaEvent(CudaEventPool& pool, c10::cuda::CUDAStream stream) : pool_(pool), event_(pool.take()) {
  const c10::cuda::CUDAGuard device(stream.device());
  const cudaError_t error = cudaEventRecord(event_, stream.stream());
  if (error != cudaSuccess) {
    pool_.give_back(event_);
    C10_CUDA_CHECK(error);
  }
}

// Leases call this while a graph unwinds after a kernel of the user's has failed, and at process exit: this must not
// throw, and a device in error does no more work. The error itself stays for `synchronize` and the next launch to
// report.
//
// While some thread captures a CUDA graph, a query would be refused and end that capture, unless this thread says that
// the query is no part of it. A refused query does not say that the event is done.
bool CudaEvent::done() const noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const bool exchanged = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  const cudaError_t error = cudaEventQuery(event_);
  if (exchanged) {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
  }
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // "not ready" is an answer; left in place, the next check would report it
  }
  const bool refused = error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
  return error != cudaErrorNotReady && !refused;
}

// As in done(): a thread that waits for a copy is no part of another thread's capture.
void CudaEvent::synchronize() const {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  const cudaError_t error = cudaEventSynchronize(event_);
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  C10_CUDA_CHECK(error);
}

void CudaEvent::block(c10::cuda::CUDAStream stream) const {
  const c10::cuda::CUDAGuard device(stream.device());
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event_, 0));
}

float CudaEvent::ms_since(const CudaEvent& earlier) const {
  const c10::cuda::CUDAGuard device(pool_.device_);  // else this would make a context on whatever device is current
  float ms = 0;
  C10_CUDA_CHECK(cudaEventElapsedTime(&ms, earlier.event_, event_));
  return ms;
}

}  // namespace ebb
