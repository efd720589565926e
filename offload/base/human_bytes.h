#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// "512 B", "22.0 MiB", "1.5 GiB": in the largest unit, of powers of 1024, that the bytes fill.
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace ebb
