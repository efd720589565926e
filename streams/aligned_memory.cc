#include "streams/aligned_memory.h"

#include <cstdlib>
#include <new>

namespace ebb {

void AlignedMemoryDeleter::operator()(std::byte* memory) const noexcept { std::free(memory); }

AlignedMemory allocate_pages(std::size_t bytes) {
  void* const memory = std::aligned_alloc(kPageBytes, round_up_to_page(bytes));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return AlignedMemory(static_cast<std::byte*>(memory));
}

}  // namespace ebb
