#pragma once

#include <CLI/CLI.hpp>

namespace ebb {

// For a flag that takes a size: turns its text ("64MiB") into bytes wherever CLI11 would read a number, and a bad one
// into CLI11's usage error.
CLI::Validator size_text();

}  // namespace ebb
