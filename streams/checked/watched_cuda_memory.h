#pragma once

#include <cstddef>

#include <c10/cuda/CUDAStream.h>

#include "streams/checked/happens_before.h"

namespace ebb {

// What HappensBefore is told of the memory of LibTorch's CUDA allocator, which tiers share with every tensor.
//
// Threads: any.

// The actor of a CUDA stream: the same one for every tier.
[[nodiscard]] HappensBefore::Actor actor_of(c10::cuda::CUDAStream stream);

// From now on, memory that the allocator takes back counts as freed by the stream whose pool it goes to, and memory
// that it returns to the system is forgotten. Later calls do nothing.
//
// Memory that somebody called record_stream for is taken back by a later call than the one that frees it, when those
// streams are done with it. Which streams they are the allocator does not say: that free comes behind all of them. A
// copy that none of them waits for is found all the same.
void watch_cuda_allocator();

// To be called before memory is first told of. If the allocator keeps none (PYTORCH_NO_CUDA_MEMORY_CACHING), nobody
// says when what was there before was freed; that has waited for all work of the device, so it is forgotten.
void forget_former_memory(const void* data, std::size_t bytes);

}  // namespace ebb
