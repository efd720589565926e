#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Device.h>

namespace ebb {

// Host memory that a GPU can copy to and from while the host goes on, and how long it took to get. Copies share the
// memory, and the last one gives it back.
struct PinnedSlab {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
  double total_s = 0;
  std::optional<double> touch_s;  // where touching and registering are steps of their own
  std::optional<double> register_s;
};

struct PinMethod {
  const char* name;
  std::function<PinnedSlab(std::size_t bytes)> make;
};

// The ways to such memory, ebb's own last. What they make must not outlive CUDA. Each throws c10::Error for what CUDA
// refuses, and std::bad_alloc or std::runtime_error where the system has no more memory.
//
// Threads: one at a time.
std::vector<PinMethod> pin_methods(c10::Device device);

// GiB/s at which this many slabs, on huge pages that are there already, are registered with CUDA: by one thread one
// after another, or by as many threads at once. Errors as above.
double register_gib_per_s(c10::Device device, std::size_t slabs, std::size_t slab_bytes, bool at_once);

}  // namespace ebb
