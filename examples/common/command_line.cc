#include "examples/common/command_line.h"

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "examples/common/bytes.h"

namespace ebb {

namespace {

CLI::Validator number(const char* what, const char* name, bool (*good)(double)) {
  return CLI::Validator(
      [what, good](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool is_number = end != text.c_str() && *end == '\0' && std::isfinite(value);
        return is_number && good(value) ? std::string() : "'" + text + "' is no number " + what;
      },
      name);
}

}  // namespace

CLI::Validator positive() {
  return number("above 0", "POSITIVE", [](double value) { return value > 0; });
}

CLI::Validator not_negative() {
  return number("from 0 up", "NONNEGATIVE", [](double value) { return value >= 0; });
}

CLI::Validator one_of(const std::map<std::string, int>& words) {
  return CLI::Validator(
      [words](std::string& text) {
        if (const auto found = words.find(text); found != words.end()) {
          text = std::to_string(found->second);
          return std::string();
        }
        std::string error = "'" + text + "' is none of";
        for (const auto& [word, value] : words) {
          error += " " + word;
        }
        return error;
      },
      "");
}

CLI::Validator size_text() {
  return CLI::Validator(
      [](std::string& text) {
        try {
          text = std::to_string(parse_bytes(text));
          return std::string();
        } catch (const std::invalid_argument& error) {
          return std::string(error.what());
        }
      },
      "SIZE");
}

std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

}  // namespace ebb
