// libFuzzer's way in: the environment's EBB_FUZZ_TARGET names the target.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "test/fuzz/targets.h"

namespace {

const ebb::FuzzTarget& chosen() {
  const char* const name = std::getenv("EBB_FUZZ_TARGET");
  const auto* const found = std::find_if(
      std::begin(ebb::kFuzzTargets), std::end(ebb::kFuzzTargets),
      [&](const ebb::FuzzTarget& target) { return name != nullptr && std::string_view(target.name) == name; });
  if (found == std::end(ebb::kFuzzTargets)) {
    std::fprintf(stderr, "EBB_FUZZ_TARGET must name a target\n");
    std::exit(1);
  }
  return *found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const ebb::FuzzTarget& target = chosen();
  target.run({data, size});
  return 0;
}
