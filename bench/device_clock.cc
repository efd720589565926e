#include "bench/device_clock.h"

#include <c10/cuda/CUDAStream.h>

namespace ebb {
namespace {

void record(std::optional<c10::Event>& event, c10::Device device) {
  event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(c10::cuda::getCurrentCUDAStream(device.index()).unwrap());
}

}  // namespace

DeviceClock::DeviceClock(c10::Device device) : device_(device) {
  if (device_.is_cuda()) {
    record(start_event_, device_);
  }
}

void DeviceClock::stop() {
  stop_ = std::chrono::steady_clock::now();
  if (device_.is_cuda()) {
    record(stop_event_, device_);
  }
}

double DeviceClock::ms() const {
  if (device_.is_cuda()) {
    return start_event_->elapsedTime(*stop_event_);
  }
  return std::chrono::duration<double, std::milli>(stop_ - start_).count();
}

}  // namespace ebb
