#include <cstdint>
#include <filesystem>
#include <string>

#include <catch2/catch.hpp>

#include "test/fuzz/targets.h"
#include "test/train/program.h"

namespace ebb {

TEST_CASE("every input of the fuzzers' corpus is answered with a value or with one documented error", "[train]") {
  const std::filesystem::path corpus = "test/fuzz/corpus";
  for (const FuzzTarget& target : kFuzzTargets) {
    std::size_t inputs = 0;
    for (const auto& entry : std::filesystem::directory_iterator(corpus / target.name)) {
      INFO(entry.path());
      const std::string bytes = read_file(entry.path());
      CHECK_NOTHROW(target.run({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}));
      ++inputs;
    }
    INFO(target.name);
    CHECK(inputs >= 3);
  }
}

}  // namespace ebb
