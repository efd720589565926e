#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// The one place that knows spdlog. Messages go to spdlog's default logger.
void log_warning(const std::string& message);
void log_debug(const std::string& message);
[[nodiscard]] bool debug_log_wanted();

// "64.0 MiB"
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace ebb
