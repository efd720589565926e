#include "streams/base/aligned_memory.h"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

// The kernel's flags of the mapping that holds `address`.
std::string mapping_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return {};
}

TEST_CASE("memory that bytes pass through on their way to a spill file is left out of core dumps, whole pages of it") {
  const AlignedMemory memory = allocate_pages(3 * kPageBytes + 1);
  CHECK(is_aligned(memory.get(), kPageBytes));
  const std::string first = mapping_flags(memory.get());
  if (first.empty()) {
    WARN("SKIPPED: the kernel does not show the flags of mappings");
    return;
  }
  CHECK_THAT(first, Catch::Contains(" dd "));
  CHECK_THAT(mapping_flags(memory.get() + 4 * kPageBytes - 1), Catch::Contains(" dd "));
  const int local = 0;
  CHECK_THAT(mapping_flags(&local), !Catch::Contains(" dd "));
}

}  // namespace
}  // namespace ebb
