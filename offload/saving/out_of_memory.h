#pragma once

#include <cstdint>
#include <memory>

namespace ebb {

class Runtime;

// Has LibTorch's CUDA allocator ask `runtime` for memory when the device has none left, as long as `runtime` lives.
//
// Note [Out of memory]
// LibTorch calls a FreeMemoryCallback whenever a request fits no block that the allocator has cached: before each
// cudaMalloc, and so also while the device has plenty. The callback is not told the size of the request. It can ask how
// much the device could give to one request (DeviceHeadroom::unsplit_bytes). Most large requests have the size of a
// tensor that autograd saves (activations, their gradients, parameters' gradients), so memory is let go where the
// device could not give the largest of these sizes: managed storages, and then what the policy has kept, are evicted
// until the device could (Runtime::evict). A larger request that fails, though letting go of all that ebb holds would
// have served it, is noted, and from then on the device is held ready for a request of that size as long as the
// offloader lives. So a program that catches c10::OutOfMemoryError and runs its step again succeeds. Managed storages
// fill a device more often than saved ones, and the program's largest tensor may be one that autograd never shows to
// ebb (logits under a NoOpGuard). So learn_request_sizes() has the allocator report every request that it grants, for
// the rest of the process: at::empty took 1.0 to 1.3 us on an H200's host, with and without.
//
// Eviction therefore begins when the device could no longer give a request of that size, which may be before any such
// request is made. While the device has more memory than that, nothing moves.
//
// The callback runs under the allocator's lock, on the thread that asked. Copies out start behind the streams that the
// storages were saved on. These streams wait for the copies, so the memory may be handed out at once.
//
// Nothing happens with allocators other than LibTorch's own (cudaMallocAsync never asks), nor while a CUDA graph is
// being captured.
void serve_when_out_of_memory(const std::shared_ptr<Runtime>& runtime);

// From the first call on, and while an offloader manages tensors, holds the devices ready for a request as large as the
// largest one that LibTorch's allocator has granted on the same device since, if letting go of all that ebb holds could
// serve it. See Note [Out of memory].
void learn_request_sizes();

// Returns how many bytes must be let go so that a device which can give `room` bytes to one request can give `reserve`
// bytes, rounded up as LibTorch rounds its requests to the device.
[[nodiscard]] std::uint64_t bytes_short(std::uint64_t room, std::uint64_t reserve);

}  // namespace ebb
