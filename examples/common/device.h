#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

#include "offload/device_meter.h"

namespace ebb {

// "auto" (a GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N". Throws std::invalid_argument for another
// name and for a GPU that does not exist.
c10::Device pick_device(const std::string& name);

// "cpu" or "cuda:0 (NVIDIA H200)".
std::string device_name(c10::Device device);

// Makes every operation give equal bits in every run. To be called before CUDA is first used: cuBLAS reads its
// part from the environment then. Slower on a GPU; on the CPU LibTorch is deterministic already.
void use_deterministic_algorithms();

// Waits until a GPU has done all its work. Returns at once on the CPU.
void synchronize(c10::Device device);

// Memory that LibTorch's allocator has handed out on a device.
class DeviceMemory {
 public:
  // On the CPU the constructor installs a CountingAllocator: earlier allocations are not counted.
  explicit DeviceMemory(c10::Device device);

  [[nodiscard]] std::uint64_t now_bytes() const;
  [[nodiscard]] std::uint64_t peak_bytes() const;

  // Gives cached memory back to the device and starts a new peak at the present level.
  void reset();

  // A meter for Options::device_meter, whose calls do not end this peak. This object must outlive the meter.
  [[nodiscard]] DeviceMeter meter();

 private:
  [[nodiscard]] std::uint64_t peak_of_allocator() const;
  void reset_allocator();

  c10::Device device_;
  std::uint64_t peak_before_ = 0;  // the peak that the meter was told of
};

}  // namespace ebb
