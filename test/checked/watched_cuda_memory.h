#pragma once

#include <cstddef>

#include <c10/cuda/CUDAStream.h>

#include "test/checked/happens_before.h"

namespace ebb {

// Reports to HappensBefore on the memory of LibTorch's CUDA allocator, which tiers share with every tensor.
//
// Threads: these functions may be called from any thread.

// The actor of a CUDA stream, which all tiers share.
[[nodiscard]] HappensBefore::Actor actor_of(c10::cuda::CUDAStream stream);

// From now on, memory that the allocator takes back counts as freed by the stream whose pool it goes to, and memory
// that it returns to the system is forgotten. Later calls do nothing.
//
// Memory that somebody called record_stream for is taken back by a later call than the one that frees it, when those
// streams are done with the memory. The allocator does not say which streams those are, so such a free comes behind all
// streams. A copy that no stream waits for is found all the same.
void watch_cuda_allocator();

// To be called before memory is first reported. If the allocator caches no memory (PYTORCH_NO_CUDA_MEMORY_CACHING),
// nothing reports when earlier memory at an address was freed; such a free has waited for all work of the device, so
// the earlier accesses are forgotten.
void forget_former_memory(const void* data, std::size_t bytes);

}  // namespace ebb
