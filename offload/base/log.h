#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// The one place that knows spdlog. Messages go to spdlog's default logger; those that come after its end, from objects
// of static lifetime, are dropped.
void log_warning(const std::string& message);
void log_info(const std::string& message);
void log_debug(const std::string& message);
[[nodiscard]] bool debug_log_wanted();

// Has the logger end after what is being made, which logs in its destructor and may be a static object.
void keep_log_alive();

// "64.0 MiB"
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

}  // namespace ebb
