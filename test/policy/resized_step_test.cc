#include "policy/resized_step.h"

#include <cstdint>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

StepRecord record_of(std::uint64_t tokens, double end_ms) {
  StepRecord record;
  record.storages = {{.bytes = 8 * tokens,
                      .saved_ms = end_ms / 4,
                      .idle_ms = end_ms / 4,
                      .needed_ms = end_ms / 2,
                      .released_ms = end_ms,
                      .other_bytes = 100 + tokens,
                      .recompute_ms = end_ms / 8,
                      .recompute_bytes = tokens}};
  record.other = {{0, 100}, {end_ms / 2, 100 + 2 * tokens}};
  record.backward_ms = end_ms / 2;
  record.end_ms = end_ms;
  return record;
}

}  // namespace

TEST_CASE("bytes that do not change, that come for each token and for each pair of tokens are known to the byte") {
  const std::uint64_t batch = 48;
  const std::uint64_t layers = GENERATE(1, 4096, 14336);
  for (const std::uint64_t asked : {513, 640, 777, 1023, 1600}) {
    const Growth growth(batch * 512 * layers, batch * 1024 * layers, batch * asked * layers);
    CHECK(growth.bytes(12345, 12345) == 12345);
    CHECK(growth.bytes(batch * 512 * 2, batch * 1024 * 2) == batch * asked * 2);
    CHECK(growth.bytes(batch * 511 * 128256, batch * 1023 * 128256) == batch * (asked - 1) * 128256);
    CHECK(growth.bytes(batch * 512 * 512 * 32, batch * 1024 * 1024 * 32) == batch * asked * asked * 32);
  }
}

TEST_CASE("a size is known near two that differ, and no bytes are below none") {
  CHECK(Growth(100, 200, 50).is_known());
  CHECK(Growth(200, 100, 250).is_known());
  CHECK_FALSE(Growth(100, 200, 49).is_known());
  CHECK_FALSE(Growth(100, 200, 251).is_known());
  CHECK_FALSE(Growth(0, 200, 100).is_known());
  CHECK_FALSE(Growth(100, 109, 105).is_known());
  CHECK(Growth(100, 200, 50).bytes(100, 1000) == 0);
}

TEST_CASE("what one of the two steps does not tell is taken from the other") {
  CHECK(Growth(100, 200, 150).bytes(0, 1000) == 750);
  CHECK(Growth(100, 200, 150).bytes(1000, 0) == 1500);
  CHECK(Growth(100, 200, 150).other_bytes(0, 1000) == 1000);
}

TEST_CASE("other memory of a smaller step is not taken to be less than the smaller of the two has") {
  CHECK(Growth(100, 200, 50).other_bytes(500, 800) == 500);
  CHECK(Growth(200, 100, 150).other_bytes(800, 500) == 650);
}

TEST_CASE("the record of a size between two has its bytes between theirs, and its times on the line through theirs") {
  const StepRecord record = resized(record_of(100, 80), record_of(200, 120), Growth(100, 200, 180));
  CHECK(record.storages[0].bytes == 8 * 180);
  CHECK(record.storages[0].other_bytes == 280);
  CHECK(record.storages[0].recompute_bytes == 180);
  CHECK(record.other[0].bytes == 100);
  CHECK(record.other[1].bytes == 460);
  CHECK(record.end_ms == Approx(112));
  CHECK(record.backward_ms == Approx(56));
  CHECK(record.storages[0].saved_ms == Approx(28));
  CHECK(record.storages[0].recompute_ms == Approx(14));
}

TEST_CASE("other memory that was recorded at other moments is as high as the highest grows") {
  const StepRecord one = record_of(100, 80);
  StepRecord other = record_of(200, 120);
  other.other.push_back({110, 50});
  const StepRecord record = resized(one, other, Growth(100, 200, 300));
  REQUIRE(record.other.size() == 3);
  CHECK(record.other[1].bytes == 700);
  CHECK(record.other[2].bytes == 250);
}

}  // namespace ebb
