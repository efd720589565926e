#include "streams/base/aligned_memory.h"

#include <sys/mman.h>

#include <new>

namespace ebb {

// The system refuses to unmap where that would split a mapping and the process has as many mappings as it may have; the
// pages then go back all the same, and their addresses are lost.
void AlignedMemoryDeleter::operator()(std::byte* memory) const noexcept {
  if (::munmap(memory, mapped_bytes) != 0) {
    static_cast<void>(::madvise(memory, mapped_bytes, MADV_DONTNEED));
  }
}

AlignedMemory map_pages(std::size_t bytes) noexcept {
  const std::size_t whole_pages = round_up_to_page(bytes);
  void* const memory = ::mmap(nullptr, whole_pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return AlignedMemory(memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory),
                       AlignedMemoryDeleter{whole_pages});
}

AlignedMemory allocate_pages(std::size_t bytes) {
  AlignedMemory memory = map_pages(bytes);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  // Note [Core dumps]. The advice concerns no neighbour, and ends with the mapping.
  static_cast<void>(::madvise(memory.get(), memory.get_deleter().mapped_bytes, MADV_DONTDUMP));
  return memory;
}

}  // namespace ebb
