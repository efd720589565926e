#include "bench/command_line.h"

#include <stdexcept>
#include <string>

#include "bench/bytes.h"

namespace ebb {

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
