#include "streams/system_memory.h"

#include <fstream>
#include <limits>
#include <string>

namespace ebb {

SystemMemory read_system_memory() {
  std::ifstream file("/proc/meminfo");
  SystemMemory memory;
  std::string name;
  std::uint64_t kib = 0;
  std::string unit;
  while (file >> name >> kib && std::getline(file, unit)) {
    if (name == "MemTotal:") {
      memory.total_bytes = kib * 1024;
    } else if (name == "MemAvailable:") {
      memory.available_bytes = kib * 1024;
    }
  }
  if (memory.total_bytes == 0 || memory.available_bytes == 0) {
    constexpr auto kAll = std::numeric_limits<std::uint64_t>::max();
    return {kAll, kAll};
  }
  return memory;
}

}  // namespace ebb
