#include "offload/base/log.h"

#include <atomic>

#include <spdlog/spdlog.h>

namespace ebb {
namespace {

std::atomic<bool> is_over{false};

// An object that is made after spdlog's registry, and so destroyed before the registry.
struct LogsEnd {
  LogsEnd() { (void)spdlog::default_logger_raw(); }
  ~LogsEnd() { is_over = true; }
  LogsEnd(const LogsEnd&) = delete;
  LogsEnd& operator=(const LogsEnd&) = delete;
};

void log(spdlog::level::level_enum level, std::string_view message) noexcept {
  if (is_over) {
    return;
  }
  try {
    spdlog::log(level, "ebb: {}", message);
  } catch (...) {  // a message that the logger throws at is dropped
  }
}

}  // namespace

void log_warning(std::string_view message) noexcept { log(spdlog::level::warn, message); }

void log_info(std::string_view message) noexcept { log(spdlog::level::info, message); }

void log_debug(std::string_view message) noexcept { log(spdlog::level::debug, message); }

void keep_log_alive() { static const LogsEnd logs_end; }

bool debug_log_wanted() { return !is_over && spdlog::should_log(spdlog::level::debug); }

}  // namespace ebb
