#include "streams/disk/spill_checksums.h"

#include <map>
#include <random>

#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"

namespace ebb {
namespace {

void write(SpillChecksums& checksums, std::uint64_t offset, std::size_t bytes, std::uint64_t checksum) {
  checksums.forget(offset, bytes);
  checksums.add(offset, bytes, checksum);
}

TEST_CASE("a checksum is known for exactly the piece that was written, once it is written") {
  SpillChecksums checksums;
  CHECK_FALSE(checksums.find(0, 100).has_value());
  checksums.forget(0, 100);
  CHECK_FALSE(checksums.find(0, 100).has_value());
  checksums.add(0, 100, 7);
  CHECK(checksums.find(0, 100) == 7);
  CHECK_FALSE(checksums.find(0, 99).has_value());
  CHECK_FALSE(checksums.find(0, 101).has_value());
  CHECK_FALSE(checksums.find(1, 99).has_value());
}

TEST_CASE("a piece that is written again is not known by its earlier checksum, also not while or after that fails") {
  SpillChecksums checksums;
  write(checksums, 0, 100, 7);
  checksums.forget(0, 100);
  CHECK_FALSE(checksums.find(0, 100).has_value());
}

TEST_CASE("writing forgets every piece that it touches and no other") {
  constexpr std::uint64_t kPages = 32;
  SpillChecksums checksums;
  std::map<std::uint64_t, std::uint64_t> model;  // page to bytes
  std::mt19937 random(1);
  for (std::uint64_t i = 1; i <= 3000; ++i) {
    const std::uint64_t page = random() % kPages;
    const std::uint64_t pages = 1 + random() % (kPages - page);
    const std::size_t cut = random() % kPageBytes;  // the last page need not be full
    write(checksums, page * kPageBytes, pages * kPageBytes - cut, pages * kPageBytes - cut);
    std::erase_if(model, [&](const auto& piece) {
      const auto [start, bytes] = piece;
      return start < page + pages && start + (bytes + kPageBytes - 1) / kPageBytes > page;
    });
    model[page] = pages * kPageBytes - cut;
    REQUIRE(checksums.size() == model.size());
    for (const auto& [start, bytes] : model) {
      REQUIRE(checksums.find(start * kPageBytes, bytes) == bytes);
    }
  }
}

}  // namespace
}  // namespace ebb
