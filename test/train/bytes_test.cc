#include "examples/common/bytes.h"

#include <stdexcept>

#include <catch2/catch.hpp>

#include "offload/base/human_bytes.h"

namespace ebb {

TEST_CASE("a size is read in powers of 1000 and of 1024, with or without a space, in any case", "[train]") {
  CHECK(parse_bytes("1") == 1);
  CHECK(parse_bytes("512B") == 512);
  CHECK(parse_bytes("3kB") == 3000);
  CHECK(parse_bytes("2GB") == 2'000'000'000);
  CHECK(parse_bytes("64MiB") == std::uint64_t{64} << 20);
  CHECK(parse_bytes("1.5 gib") == std::uint64_t{3} << 29);
  CHECK(parse_bytes("2TiB") == std::uint64_t{2} << 40);
}

TEST_CASE("what is no size is refused with its text", "[train]") {
  for (const char* text :
       {"", "MiB", "-1", "0", "0.2B", "64 MiB x", "64M", "1e3MB", "nan", "inf", "9e99TiB", "9999999TiB"}) {
    INFO(text);
    CHECK_THROWS_WITH(parse_bytes(text), Catch::StartsWith("'" + std::string(text) + "'"));
  }
}

TEST_CASE("a number of bytes is shown in the largest unit that it fills", "[train]") {
  CHECK(human_bytes(0) == "0 B");
  CHECK(human_bytes(1023) == "1023 B");
  CHECK(human_bytes(1024) == "1.0 KiB");
  CHECK(human_bytes(std::uint64_t{22} << 20) == "22.0 MiB");
  CHECK(human_bytes(std::uint64_t{3} << 29) == "1.5 GiB");
}

}  // namespace ebb
