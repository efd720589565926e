#pragma once

#include <cstdint>

namespace ebb {

struct SystemMemory {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // what programs can still get without swapping, by the kernel's estimate
};

// From /proc/meminfo; all of the address space where that cannot be read, so that nobody is refused memory for it.
SystemMemory read_system_memory();

}  // namespace ebb
