#pragma once

#include <string>
#include <string_view>

#include "bench/train/run.h"

namespace ebb {

// A result as bytes, to the last bit, for another process of the same program.
std::string to_bytes(const RunResult& result);

// Only of what to_bytes gave.
RunResult run_result_of(std::string_view bytes);

}  // namespace ebb
