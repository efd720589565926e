#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// Formats a number of bytes for people, in the largest unit (powers of 1024) of which there is at least one: "512 B",
// "22.0 MiB", "1.5 GiB".
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace ebb
