#pragma once

#include <cstddef>
#include <span>

#include "bench/raw_disk.h"

namespace ebb {

// GB/s (1e9 bytes) at which one thread copies and hashes what an I/O thread copies and hashes of such a load (Note
// [Checked chunks] in streams/disk/io_slot.h): a write's chunks go to buffers, one for each that may be in flight, and
// are hashed there; a read's are hashed where they are. One pass over `memory`.
[[nodiscard]] double chunk_check_gb_per_s(const DiskLoad& load, std::span<const std::byte> memory);

}  // namespace ebb
