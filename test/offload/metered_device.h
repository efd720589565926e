#pragma once

#include <algorithm>
#include <cstdint>

#include <c10/core/CPUAllocator.h>

#include "offload/device_meter.h"
#include "test/simulated/simulated_device_allocator.h"

namespace ebb {

// The device's memory in use. Watches it beside whoever asks its meter.
class MeteredDevice {
 public:
  [[nodiscard]] DeviceMeter meter() {
    return [this] { return take(); };
  }

  void start_peak() {
    take();
    peak_ = 0;
  }
  [[nodiscard]] std::uint64_t peak() {
    take();
    return peak_;
  }

 private:
  DeviceUse take() {
    auto& allocator = dynamic_cast<SimulatedDeviceAllocator&>(*c10::GetCPUAllocator());
    const auto [now, peak] = allocator.bytes();
    allocator.reset_peak();
    peak_ = std::max(peak_, peak);
    return {now, peak};
  }

  std::uint64_t peak_ = 0;
};

}  // namespace ebb
