#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ebb {

// A page: the unit of direct I/O here. Offsets and sizes in the spill file are whole pages, and memory that starts on a
// page suits every file system.
inline constexpr std::size_t kPageBytes = 4096;

[[nodiscard]] constexpr std::size_t round_up_to_page(std::size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

[[nodiscard]] inline bool is_aligned(const void* pointer, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

struct AlignedMemoryDeleter {
  std::size_t mapped_bytes = 0;
  void operator()(std::byte* memory) const noexcept;
};

using AlignedMemory = std::unique_ptr<std::byte[], AlignedMemoryDeleter>;

// Memory that starts on a page and covers whole pages: a mapping of its own, all zeros. Null where the system refuses.
[[nodiscard]] AlignedMemory map_pages(std::size_t bytes) noexcept;

// The same, for bytes on their way. Throws std::bad_alloc.
//
// Note [Core dumps]
// The system leaves this memory out of core dumps (MADV_DONTDUMP, best effort), so that bytes on their way to or from a
// spill file are in no core dump; the file itself is not mapped, and so never dumped. Core dumps do have a tensor's own
// memory, before its bytes leave and after they are back, and host memory that serves a GPU.
[[nodiscard]] AlignedMemory allocate_pages(std::size_t bytes);

}  // namespace ebb
