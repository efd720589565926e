#include "bench/fits/search.h"

#include <catch2/catch.hpp>

namespace ebb {
namespace {

Largest find(std::int64_t limit, std::int64_t guess, std::int64_t most, double resolution = 0) {
  return find_largest(guess, most, resolution, [limit](std::int64_t size) { return size <= limit; });
}

}  // namespace

TEST_CASE("the largest size that fits is found from any guess", "[train]") {
  constexpr std::int64_t kMost = 40;
  for (std::int64_t limit = 0; limit < kMost; ++limit) {
    for (std::int64_t guess = -1; guess <= kMost + 1; ++guess) {
      INFO(limit << " guessed as " << guess);
      const Largest largest = find(limit, guess, kMost);
      CHECK(largest.fitting == limit);
      CHECK(largest.failed == limit + 1);
    }
  }
}

TEST_CASE("where everything fits, nothing is said to have failed", "[train]") {
  const Largest largest = find(1000, 3, 40);
  CHECK(largest.fitting == 40);
  CHECK_FALSE(largest.failed);
}

TEST_CASE("a good guess takes two tries", "[train]") {
  CHECK(find(80, 80, 1000).tries == 2);
  CHECK(find(80, 81, 1000).tries == 2);
}

TEST_CASE("a search ends once it knows the size within its resolution", "[train]") {
  const Largest largest = find(1000, 10, 1 << 20, 0.05);
  CHECK(largest.fitting <= 1000);
  CHECK(largest.failed.value() > 1000);
  CHECK(largest.failed.value() - largest.fitting <= 50);
  CHECK(largest.tries < 16);
}

}  // namespace ebb
