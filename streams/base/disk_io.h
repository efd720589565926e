#pragma once

#include <cstdint>

namespace ebb {

// What reads and writes a spill file.
enum class DiskIo : std::uint8_t {
  kAuto,     // io_uring where the kernel permits it, else threads
  kUring,    // io_uring, or an error
  kThreads,  // a few threads that call pread and pwrite
};

}  // namespace ebb
