#include "streams/base/aligned_memory.h"

#include <sys/mman.h>

#include <new>

namespace ebb {

void AlignedMemoryDeleter::operator()(std::byte* memory) const noexcept { ::munmap(memory, mapped_bytes); }

// Maps memory of its own, so that the advice below concerns no neighbour and ends with the mapping.
AlignedMemory allocate_pages(std::size_t bytes) {
  const std::size_t whole_pages = round_up_to_page(bytes);
  void* const memory = ::mmap(nullptr, whole_pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::bad_alloc();
  }
  static_cast<void>(::madvise(memory, whole_pages, MADV_DONTDUMP));  // Note [Core dumps]
  return AlignedMemory(static_cast<std::byte*>(memory), AlignedMemoryDeleter{whole_pages});
}

}  // namespace ebb
