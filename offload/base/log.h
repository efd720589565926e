#pragma once

#include <string_view>

namespace ebb {

// Messages go to spdlog's default logger, and only this unit knows spdlog. A message after the logger's end, from an
// object of static lifetime, is dropped, and so is a message that the logger throws at.
void log_warning(std::string_view message) noexcept;
void log_info(std::string_view message) noexcept;
void log_debug(std::string_view message) noexcept;
[[nodiscard]] bool debug_log_wanted();

// Called in the constructor of an object that logs in its destructor. If the object is static, the logger then ends
// after the object.
void keep_log_alive();

}  // namespace ebb
