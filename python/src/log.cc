// Where ebb logs to in a Python process.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "python/src/bind.h"

namespace ebb::python {

// To stderr, where Python's warnings go: what a program prints is its own affair. Not to Python's logging, which needs
// the GIL, for ebb logs under locks of its own.
void log_to_stderr() { spdlog::set_default_logger(spdlog::stderr_logger_mt("ebb")); }

}  // namespace ebb::python
