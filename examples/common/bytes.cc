#include "examples/common/bytes.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace ebb {
namespace {

constexpr std::array<std::pair<std::string_view, double>, 10> kUnits = {{{"", 1.0},
                                                                         {"b", 1.0},
                                                                         {"kb", 1e3},
                                                                         {"mb", 1e6},
                                                                         {"gb", 1e9},
                                                                         {"tb", 1e12},
                                                                         {"kib", 0x1p10},
                                                                         {"mib", 0x1p20},
                                                                         {"gib", 0x1p30},
                                                                         {"tib", 0x1p40}}};
constexpr double kMostBytes = 0x1p63;

[[noreturn]] void refuse(std::string_view text, const char* why) {
  throw std::invalid_argument("'" + std::string(text) + "' " + why);
}

}  // namespace

std::uint64_t parse_bytes(std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) {
    refuse(text, "is not a size: write a number and a unit, such as 64MiB or 2GB");
  }
  std::string unit(std::find_if(rest, end, [](char c) { return c != ' '; }), end);
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto* const known = std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& u) { return u.first == unit; });
  if (known == kUnits.end()) {
    refuse(text, "has no known unit: use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB");
  }
  const double bytes = number * known->second;
  if (!(bytes >= 1.0)) {
    refuse(text, "is too small: a size is at least 1 byte");
  }
  if (!(bytes < kMostBytes)) {
    refuse(text, "is too large: a size is less than 2^63 bytes");
  }
  return static_cast<std::uint64_t>(std::llround(bytes));
}

}  // namespace ebb
