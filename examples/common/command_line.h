#pragma once

#include <map>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

namespace ebb {

// For a flag that takes a size: turns its text ("64MiB") into bytes wherever CLI11 would read a number, and a bad one
// into CLI11's usage error.
CLI::Validator size_text();

// For a flag that takes a number: a usage error where the text is no number, or the number is not finite or not in
// range. (CLI11 has such checks too, whose errors name the largest double, with 309 digits, as the end of the range.)
CLI::Validator positive();
CLI::Validator not_negative();

// For a flag that takes one of these words, of an enumeration's values: a usage error that names the words where the
// text is none of them. (CLI11's own check prints the values, and those of a uint8_t as characters.)
CLI::Validator one_of(const std::map<std::string, int>& words);

template <typename Enumeration>
CLI::Validator one_of(const std::map<std::string, Enumeration>& words) {
  std::map<std::string, int> numbers;
  for (const auto& [word, value] : words) {
    numbers[word] = static_cast<int>(value);
  }
  return one_of(numbers);
}

// Reads the command line. Returns the status to exit with if the program is to end here: after --help, or after a usage
// error, which has been printed.
[[nodiscard]] std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv);

}  // namespace ebb
