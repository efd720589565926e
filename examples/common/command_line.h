#pragma once

#include <optional>

#include <CLI/CLI.hpp>

namespace ebb {

// For a flag that takes a size: turns its text ("64MiB") into bytes wherever CLI11 would read a number, and a bad one
// into CLI11's usage error.
CLI::Validator size_text();

// For a flag that takes a number: a usage error where the text is no number, or the number is not finite or not in
// range. (CLI11 has such checks too, whose errors name the largest double, with 309 digits, as the end of the range.)
CLI::Validator positive();
CLI::Validator not_negative();

// Reads the command line. Returns the status to exit with if the program is to end here: after --help, or after a usage
// error, which has been printed.
[[nodiscard]] std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv);

}  // namespace ebb
