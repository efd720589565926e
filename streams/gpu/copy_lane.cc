#include "streams/gpu/copy_lane.h"

#include <span>
#include <utility>

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

CopyLane::CopyLane(c10::Device device, cudaMemcpyKind kind, How how, std::shared_ptr<GpuTimes> times)
    : device_(device),
      kind_(kind),
      how_(how),
      side_stream_(how == How::kOnCurrentStream
                       ? std::nullopt
                       : std::optional(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()))),
      times_(std::move(times)) {}

Ticket CopyLane::copy(void* to, const void* from, std::size_t bytes, const After& after) {
  const Gates gates = this->gates(after);  // without the lock: a gate may be a batch of this very lane
  const CopyBatch::Gates events(gates.data(), gates.size());
  const auto streams = in_force(WaitPoint::kLaneGates) ? after.streams() : std::span<const c10::Stream>();
  const bool is_batched = how_ == How::kBatched && bytes <= CopyBatch::kLargestCopy;
  const MutexLock lock(mutex_);
  if (is_batched && batch_ != nullptr && batch_->add(to, from, bytes, events, streams)) {
    return batch_;
  }
  close_batch();
  const c10::cuda::CUDAStream stream = side_stream_ ? *side_stream_ : c10::cuda::getCurrentCUDAStream(device_.index());
  auto batch = std::make_shared<CopyBatch>(stream, kind_, is_batched ? CopyBatch::kMostCopies : 1, streams, times_);
  static_cast<void>(batch->add(to, from, bytes, events, streams));
  if (is_batched) {
    batch_ = batch;
  } else {
    static_cast<void>(batch->queued());  // throws the error for which the copy could not be queued
  }
  return batch;
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

}  // namespace ebb
