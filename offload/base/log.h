#pragma once

#include <string_view>

namespace ebb {

// Messages go to spdlog's default logger, and only this unit knows spdlog. A message after the logger's end, from an
// object of static lifetime, is dropped, and so is a message that the logger throws at.
void log_warning(std::string_view message) noexcept;
void log_info(std::string_view message) noexcept;
void log_debug(std::string_view message) noexcept;
[[nodiscard]] bool debug_log_wanted();

// Called while an object is made that logs in its destructor and may be a static object: has log_warning() and the
// others notice the logger's end, and so keeps that destructor from logging after it.
void keep_log_alive();

}  // namespace ebb
