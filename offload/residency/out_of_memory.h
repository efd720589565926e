#pragma once

#include <cstdint>
#include <memory>

namespace ebb {

class Residency;

// Has LibTorch's CUDA allocator ask `residency` for memory when its device has none left, as long as that lives.
//
// Note [Out of memory]
// LibTorch calls a FreeMemoryCallback whenever a request fits no block that the allocator has cached: before each
// cudaMalloc, and so also while there is plenty. It does not say how much is asked for. What is known is what the
// device could give to one request (DeviceHeadroom::unsplit_bytes). Most large requests have the size of something that
// autograd saves (activations, their gradients, parameters' gradients), so there is need where the device could not
// give the largest of these; what the policy has kept is then evicted until it could (Residency::evict). A larger
// request that fails, though what is saved would have made room for it, is noted, and the device is held ready for it
// from then on, as long as the offloader lives: a program that catches c10::OutOfMemoryError and runs its step again
// succeeds.
//
// So a device may be short of up to that size before any memory is really asked for, and what is then evicted is
// evicted early. While it has more, nothing moves.
//
// The callback runs under the allocator's lock, on the thread that asked. Copies out start behind the streams that the
// storages were saved on, which wait for them, so the memory may be handed out at once.
//
// Not for allocators other than LibTorch's own (cudaMallocAsync never asks), nor while a graph is being captured.
void serve_when_out_of_memory(const std::shared_ptr<Residency>& residency);

// How much must be let go so that a device which can give `room` to one request can give `reserve`, in the units in
// which LibTorch asks it.
[[nodiscard]] std::uint64_t bytes_short(std::uint64_t room, std::uint64_t reserve);

}  // namespace ebb
