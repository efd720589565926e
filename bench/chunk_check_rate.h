#pragma once

#include <cstddef>
#include <span>

#include "streams/io_request.h"

namespace ebb {

// GB/s (1e9 bytes) at which one thread does all that an I/O thread does with a chunk besides moving it (Note [Checked
// chunks] in streams/io_slot.h): copy and hash for a write, hash for a read. One pass over `memory`, in chunks.
[[nodiscard]] double chunk_check_gb_per_s(IoKind kind, std::span<const std::byte> memory);

}  // namespace ebb
