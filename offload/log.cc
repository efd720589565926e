#include "offload/log.h"

#include <array>

#include <spdlog/spdlog.h>

namespace ebb {

void log_warning(const std::string& message) { spdlog::warn("ebb: {}", message); }

void log_info(const std::string& message) { spdlog::info("ebb: {}", message); }

void log_debug(const std::string& message) { spdlog::debug("ebb: {}", message); }

void keep_log_alive() { (void)spdlog::default_logger_raw(); }

bool debug_log_wanted() { return spdlog::should_log(spdlog::level::debug); }

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace ebb
