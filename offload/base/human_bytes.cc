#include "offload/base/human_bytes.h"

#include <array>
#include <cstddef>
#include <cstdio>

namespace ebb {

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> out{};
  std::snprintf(out.data(), out.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return out.data();
}

}  // namespace ebb
