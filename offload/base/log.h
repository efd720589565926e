#pragma once

#include <string_view>

namespace ebb {

// The one place that knows spdlog. Messages go to spdlog's default logger; those that come after its end, from objects
// of static lifetime, are dropped, and so is one that a logger throws at.
void log_warning(std::string_view message) noexcept;
void log_info(std::string_view message) noexcept;
void log_debug(std::string_view message) noexcept;
[[nodiscard]] bool debug_log_wanted();

// Has the logger end after what is being made, which logs in its destructor and may be a static object.
void keep_log_alive();

}  // namespace ebb
