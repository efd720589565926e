#pragma once

#include <cstdint>
#include <filesystem>

namespace ebb {

// The memory that this process may use: the machine's, or where that is less, that of the control groups that the
// process is in (a container, a batch job, a systemd unit).
struct SystemMemory {
  std::uint64_t total_bytes = 0;
  std::uint64_t available_bytes = 0;  // free without swapping, by the kernel's estimate
};

// All of the address space where the kernel says nothing, so that nobody is refused memory for it.
SystemMemory read_system_memory();

// Whether a sixteenth of the memory that this process may use would be left if the process took so many bytes more.
// What takes host memory by the gigabyte asks first: the kernel ends a process that leaves none.
bool leaves_a_reserve(std::uint64_t bytes);

// The least limit of the control groups whose files, of version 2 or 1, lie in `root` and in each folder on the way to
// `group`, a path below it, and the part that is left (page cache that the kernel would drop counts as left).
// `otherwise` where there is no limit, or none below `otherwise`'s.
SystemMemory within_control_groups(std::filesystem::path root, const std::filesystem::path& group,
                                   const SystemMemory& otherwise);

}  // namespace ebb
