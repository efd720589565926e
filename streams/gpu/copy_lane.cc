#include "streams/gpu/copy_lane.h"

#include <optional>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "streams/base/fault_point.h"

namespace ebb {

std::shared_ptr<const CudaEvent> event_of(const Ticket& ticket) {
  if (ticket == nullptr) {
    return nullptr;
  }
  if (auto event = std::dynamic_pointer_cast<const CudaEvent>(ticket)) {
    return event;
  }
  if (const auto* const batch = dynamic_cast<const CopyBatch*>(ticket.get())) {
    return batch->queued();
  }
  ticket->synchronize();  // a ticket of some other kind of queue: only the host can wait for it
  return nullptr;
}

CopyLane::CopyLane(c10::Device device, cudaMemcpyKind kind, Where where, Small small, std::shared_ptr<GpuTimes> times)
    : device_(device),
      kind_(kind),
      where_(where),
      small_(small),
      side_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
      times_(std::move(times)),
      events_(CudaEventPool::of(device, CudaEventPool::Timing::kOff)) {}

Ticket CopyLane::copy(void* to, const void* from, std::size_t bytes, const After& after) {
  const Gates gates = this->gates(after);  // without the lock: a gate may be a batch of this very lane
  const auto streams = in_force(WaitPoint::kLaneGates) ? after.streams() : std::span<const c10::Stream>();
  const MutexLock lock(mutex_);
  if (small_ == Small::kBatched && bytes <= CopyBatch::kLargestCopy && streams.size() <= 1) {
    return join_batch(to, from, bytes, gates, streams);
  }
  const c10::cuda::CUDAGuard device(device_);
  const c10::cuda::CUDAStream stream =
      where_ == Where::kSideStream ? side_stream_ : c10::cuda::getCurrentCUDAStream(device_.index());
  close_batch();
  for (const auto& gate : gates) {
    gate->block(stream);
  }
  for (const c10::Stream each : streams) {
    if (const c10::cuda::CUDAStream other(each); other != stream) {
      events_.record(other)->block(stream);
    }
  }
  return copy_alone(stream, to, from, bytes);
}

// A copy out starts when its tickets are over, even with errors; a copy in must not start if a ticket failed.
CopyLane::Gates CopyLane::gates(const After& after) const {
  Gates gates;
  if (!in_force(WaitPoint::kLaneGates)) {
    return gates;
  }
  for (const Ticket& ticket : after.tickets()) {
    try {
      if (auto event = event_of(ticket)) {
        gates.push_back(std::move(event));
      }
    } catch (...) {
      if (kind_ == cudaMemcpyHostToDevice) {
        throw;
      }
    }
  }
  return gates;
}

Ticket CopyLane::join_batch(void* to, const void* from, std::size_t bytes, const Gates& gates,
                            std::span<const c10::Stream> streams) {
  const std::optional<c10::Stream> stream = streams.empty() ? std::nullopt : std::optional(streams.front());
  const CopyBatch::Gates events(gates.data(), gates.size());
  if (batch_ == nullptr || !batch_->add(to, from, bytes, events, stream)) {
    close_batch();
    batch_ = std::make_shared<CopyBatch>(side_stream_, kind_, stream, events_, times_);
    static_cast<void>(batch_->add(to, from, bytes, events, stream));
  }
  return batch_;
}

void CopyLane::flush() noexcept {
  const MutexLock lock(mutex_);
  close_batch();
}

// The open batch is queued before a later copy, because sources are let go in the order of the calls.
void CopyLane::close_batch() noexcept {
  if (const auto batch = std::exchange(batch_, nullptr)) {
    try {
      static_cast<void>(batch->queued());
    } catch (...) {  // the error reaches those who wait for the batch
    }
  }
}

Ticket CopyLane::copy_alone(c10::cuda::CUDAStream stream, void* to, const void* from, std::size_t bytes) {
  std::shared_ptr<const CudaEvent> before = times_->record_for_trace(stream);
  C10_CUDA_CHECK(fails(FaultPoint::kCopy) ? cudaErrorInvalidValue
                                          : cudaMemcpyAsync(to, from, bytes, kind_, stream.stream()));
  std::shared_ptr<const CudaEvent> done;
  try {
    done = before != nullptr ? times_->record(stream) : events_.record(stream);
  } catch (...) {
    // Without a ticket nobody could tell when the memory is free again, so the host waits.
    static_cast<void>(cudaStreamSynchronize(stream.stream()));
    throw;
  }
  if (before != nullptr) {
    times_->add(track_of(kind_), bytes, std::move(before), done);
  }
  return done;
}

}  // namespace ebb
