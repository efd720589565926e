#include "bench/size_flag.h"

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

}  // namespace ebb
