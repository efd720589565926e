#include "streams/gpu/copy_batch.h"

#include <algorithm>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "streams/base/fault_point.h"

namespace ebb {

CopyBatch::CopyBatch(c10::cuda::CUDAStream lane, cudaMemcpyKind kind, std::size_t copies,
                     std::span<const c10::Stream> streams, std::shared_ptr<GpuTimes> times)
    : lane_(lane),
      kind_(kind),
      most_copies_(copies),
      streams_(streams.begin(), streams.end()),
      events_(CudaEventPool::of(lane.device(), CudaEventPool::Timing::kOff)),
      times_(std::move(times)),
      open_(std::make_unique<Copies>()) {
  open_->to.reserve(copies);
  open_->from.reserve(copies);
  open_->sizes.reserve(copies);
}

bool CopyBatch::add(void* to, const void* from, std::size_t bytes, Gates gates, std::span<const c10::Stream> streams) {
  const MutexLock lock(mutex_);
  if (open_ == nullptr || !std::equal(streams.begin(), streams.end(), streams_.begin(), streams_.end())) {
    return false;
  }
  Copies& copies = *open_;
  for (const auto& gate : gates) {
    if (std::find(copies.gates.begin(), copies.gates.end(), gate) == copies.gates.end()) {
      copies.gates.push_back(gate);
    }
  }
  // From here on nothing throws: the copy is in the batch, or its caller has been told that it is not.
  copies.to.push_back(to);
  copies.from.push_back(from);
  copies.sizes.push_back(bytes);
  copies.bytes += bytes;
  if (copies.bytes >= kMostBytes || copies.sizes.size() == most_copies_) {
    queue_locked();
  }
  return true;
}

std::shared_ptr<const CudaEvent> CopyBatch::queued() const {
  const MutexLock lock(mutex_);
  if (open_ != nullptr) {
    queue_locked();
  }
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
  return done_;
}

bool CopyBatch::done() const noexcept { return is_queued_.load(std::memory_order_acquire) && is_done(done_); }

void CopyBatch::synchronize() const {
  if (const auto event = queued()) {
    event->synchronize();
  }
}

void CopyBatch::queue_locked() const noexcept {
  try {
    queue_copies();
  } catch (...) {
    error_ = std::current_exception();
    static_cast<void>(cudaStreamSynchronize(lane_.stream()));  // queued copies must be over before the ticket is done
    static_cast<void>(cudaGetLastError());
  }
  open_ = nullptr;
  is_queued_.store(true, std::memory_order_release);
}

void CopyBatch::queue_copies() const {
  const c10::cuda::CUDAGuard device(lane_.device());
  pass_gates();
  std::shared_ptr<const CudaEvent> before = times_->record_for_trace(lane_);
  hand_over();
  try {
    done_ = before != nullptr ? times_->record(lane_) : events_.record(lane_);
  } catch (...) {  // without an event nobody could tell when the memory is free again, so the host waits
    C10_CUDA_CHECK(cudaStreamSynchronize(lane_.stream()));
    return;
  }
  if (before != nullptr) {
    const auto track = kind_ == cudaMemcpyDeviceToHost ? TraceTrack::kOutLane : TraceTrack::kInLane;
    times_->add(track, open_->bytes, std::move(before), done_);
  }
}

void CopyBatch::pass_gates() const {
  for (const auto& gate : open_->gates) {
    gate->block(lane_);
  }
  for (const c10::Stream each : streams_) {
    const c10::cuda::CUDAStream stream(each);
    if (stream == lane_) {
      continue;
    }
    std::shared_ptr<const CudaEvent> point;
    try {
      point = events_.record(stream);
    } catch (...) {  // no event: then the host waits, and nothing is lost
      C10_CUDA_CHECK(cudaStreamSynchronize(stream.stream()));
      continue;
    }
    point->block(lane_);
  }
}

void CopyBatch::hand_over() const {
  const Copies& copies = *open_;
  const std::size_t count = copies.sizes.size();
  if (count > 1) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;  // the first copy that the attributes are of
    if (!fails(FaultPoint::kCopy) &&
        cudaMemcpyBatchAsync(open_->to.data(), open_->from.data(), open_->sizes.data(), count, &attributes, &first,
                             /*numAttrs=*/1, lane_.stream()) == cudaSuccess) {
      return;
    }
    static_cast<void>(cudaGetLastError());
  }
  // One copy may be at fault: the other copies need not fail with it. Copies that the batch had queued run twice, to
  // the same effect.
  for (std::size_t i = 0; i < count; ++i) {
    C10_CUDA_CHECK(fails(FaultPoint::kCopy)
                       ? cudaErrorInvalidValue
                       : cudaMemcpyAsync(copies.to[i], copies.from[i], copies.sizes[i], kind_, lane_.stream()));
  }
}

}  // namespace ebb
