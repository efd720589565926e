#pragma once

#include <cstdint>
#include <string_view>

namespace ebb {

// A number of bytes as a person writes it: "1048576", "64MiB", "1.5 GiB", "2GB". Units: B; kB, MB, GB, TB (powers of
// 1000); KiB, MiB, GiB, TiB (powers of 1024); upper and lower case alike. Throws std::invalid_argument, with the text,
// for anything else, for zero and for more than 2^63 bytes. (CLI11's AsSizeValue refuses fractions,
// such as 27.7GB, and takes zero.)
std::uint64_t parse_bytes(std::string_view text);

}  // namespace ebb
