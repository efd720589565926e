#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace ebb::graphs {

// Bytes of tensors on the device. On the CPU they are counted by a SimulatedDeviceAllocator, if one is installed, else
// 0. What this thread's failed backward passes left in their queue is released first, and on a GPU what LibTorch's
// libraries keep for themselves.
[[nodiscard]] std::uint64_t device_bytes(c10::Device device);

// The same once it has not changed for some milliseconds, on a GPU, where LibTorch's threads let go of what they ran a
// little later than backward returns.
[[nodiscard]] std::uint64_t settled_device_bytes(c10::Device device);

// The same once it is down to `expected`, for which it waits: at most a second on a GPU, and 20 ms on the CPU, where
// only backward passes on several threads let go late.
[[nodiscard]] std::uint64_t device_bytes_at_rest(c10::Device device, std::uint64_t expected);

}  // namespace ebb::graphs
