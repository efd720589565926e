#include "examples/common/bytes.h"

#include <stdexcept>
#include <string_view>

#include "offload/base/human_bytes.h"
#include "test/fuzz/targets.h"

namespace ebb {

void require_of_parser(bool holds, const char* what) {
  if (!holds) {
    throw std::logic_error(what);
  }
}

void fuzz_bytes(FuzzInput input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  try {
    const std::uint64_t bytes = parse_bytes(text);
    require_of_parser(bytes >= 1 && bytes < (std::uint64_t{1} << 63), "a size outside of its range");
    require_of_parser(!human_bytes(bytes).empty(), "a size that is shown as nothing");
  } catch (const std::invalid_argument& error) {
    const std::string_view shown = text.substr(0, text.find('\0'));  // what() ends at the first NUL
    require_of_parser(std::string_view(error.what()).substr(1).starts_with(shown), "an error without the text");
  }
}

}  // namespace ebb
