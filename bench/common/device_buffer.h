#pragma once

#include <cstddef>

#include <c10/core/Device.h>

namespace ebb {

// Memory of a GPU, straight from CUDA. Its content is not set.
class DeviceBuffer {
 public:
  // Throws c10::Error where the GPU has no memory left.
  DeviceBuffer(c10::Device device, std::size_t bytes);

  // Waits for the device: a copy may still be under way.
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  const c10::Device device_;
  std::byte* data_ = nullptr;
};

}  // namespace ebb
