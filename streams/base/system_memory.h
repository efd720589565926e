#pragma once

#include <cstdint>
#include <filesystem>

namespace ebb {

// What this process may use: the machine's memory, or its control group's where that is less (a container).
struct SystemMemory {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // what can still be had without swapping, by the kernel's estimate
};

// All of the address space where the kernel says nothing, so that nobody is refused memory for it.
SystemMemory read_system_memory();

// The limit of the control group whose files lie in `folder`, of version 2 or 1, and what is left of it (page cache
// that the kernel would drop counts as left). `otherwise` where there is no limit, or a larger one.
SystemMemory within_control_group(const std::filesystem::path& folder, const SystemMemory& otherwise);

}  // namespace ebb
