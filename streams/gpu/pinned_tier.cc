#include "streams/gpu/pinned_tier.h"

#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "streams/base/fault_point.h"
#include "streams/gpu/host_slabs.h"

namespace ebb {
namespace {

c10::cuda::CUDAStream cuda(c10::Stream stream) { return c10::cuda::CUDAStream(stream); }

CopyLane::How how(const PinnedTier::Config& config) {
  return !config.overlapped ? CopyLane::How::kOnCurrentStream
         : config.pinned    ? CopyLane::How::kBatched
                            : CopyLane::How::kOnSideStream;
}

bool is_capturing(c10::cuda::CUDAStream stream) {
  const c10::cuda::CUDAGuard device(stream.device());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream.stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

PinnedTier::PinnedTier(const Config& config)
    : config_(config),
      events_(CudaEventPool::of(config.device, CudaEventPool::Timing::kOff)),
      times_(std::make_shared<GpuTimes>(config.device, config.trace)),
      out_lane_(config.device, cudaMemcpyDeviceToHost, how(config), times_),
      in_lane_(config.device, cudaMemcpyHostToDevice, how(config), times_),
      pool_(std::make_shared<BlockPool>(std::make_unique<HostSlabs>(config.device, config.pinned),
                                        config.capacity_bytes)) {}

c10::Stream PinnedTier::current_stream() const {
  return c10::cuda::getCurrentCUDAStream(config_.device.index()).unwrap();
}

bool PinnedTier::captures() const { return is_capturing(cuda(current_stream())); }

Ticket PinnedTier::record(c10::Stream stream) { return events_.record(cuda(stream)); }

void PinnedTier::make_wait(c10::Stream stream, const Ticket& ticket) {
  if (!in_force(WaitPoint::kStreamWait)) {
    return;
  }
  const auto event = event_of(ticket);
  if (is_done(event)) {
    return;
  }
  const c10::cuda::CUDAStream compute = cuda(stream);
  if (is_capturing(compute)) {  // CUDA refuses a wait for other streams' work in a capture, and ends the capture
    event->synchronize();
    return;
  }
  const MutexLock lock(wait_mutex_);
  auto before = times_->record(compute);
  event->block(compute);
  times_->add(TraceTrack::kCompute, 0, std::move(before), times_->record(compute));
}

Ticket PinnedTier::time_point(c10::Stream stream) { return times_->record(cuda(stream)); }

double PinnedTier::ms_between(const Ticket& earlier, const Ticket& later) const {
  return dynamic_cast<const CudaEvent&>(*later).ms_since(dynamic_cast<const CudaEvent&>(*earlier));
}

void PinnedTier::flush() noexcept {
  out_lane_.flush();
  in_lane_.flush();
}

c10::DataPtr PinnedTier::take_memory(std::size_t bytes, c10::Stream stream) {
  const c10::cuda::CUDAStreamGuard guard(stream);  // and its device
  TORCH_CHECK_WITH(OutOfMemoryError, !fails(FaultPoint::kDeviceAllocation), "cannot allocate ", bytes,
                   " bytes of device memory to copy back to");
  return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
}

Ticket PinnedTier::copy_out(const Block& to, const void* from, const After& after) {
  return out_lane_.copy(to.data(), from, to.size(), after);
}

Ticket PinnedTier::copy_in(void* to, const Block& from, const After& after) {
  return in_lane_.copy(to, from.data(), from.size(), after);
}

}  // namespace ebb
