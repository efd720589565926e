#pragma once

#include <cstdint>

#include <c10/core/Device.h>

namespace ebb {

// From now on LibTorch's allocator takes at most so many bytes from the GPU. What the allocator cannot use of its
// blocks counts, too. Throws std::invalid_argument for a cap that is more than the GPU has.
void cap_memory(std::uint64_t cap_bytes, c10::Device device);

}  // namespace ebb
