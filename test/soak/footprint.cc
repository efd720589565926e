#include "test/soak/footprint.h"

#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <stdexcept>

namespace ebb {

std::uint64_t heap_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

std::uint64_t resident_bytes() {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> statm(std::fopen("/proc/self/statm", "re"), &std::fclose);
  unsigned long long resident_pages = 0;
  if (statm == nullptr || std::fscanf(statm.get(), "%*u %llu", &resident_pages) != 1) {
    throw std::runtime_error("cannot read /proc/self/statm");
  }
  return resident_pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

void keep_heap_compact() {
  constexpr int kLargeBytes = 128 << 10;  // the first value of both; setting it stops glibc from raising it
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, kLargeBytes);
  mallopt(M_TRIM_THRESHOLD, kLargeBytes);
}

}  // namespace ebb
