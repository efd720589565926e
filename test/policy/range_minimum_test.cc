#include "policy/range_minimum.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

TEST_CASE("the least between two indices is that of the values from the one to the other") {
  std::mt19937_64 random(1);
  for (std::size_t count = 1; count <= 40; ++count) {
    std::vector<std::uint64_t> values(count);
    for (std::uint64_t& value : values) {
      value = random() % 100;
    }
    const RangeMinimum least(values);
    for (std::size_t first = 0; first < count; ++first) {
      for (std::size_t last = first; last < count; ++last) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
        const auto end = values.begin() + static_cast<std::ptrdiff_t>(last) + 1;
        CAPTURE(count, first, last);
        CHECK(least(first, last) == *std::min_element(begin, end));
      }
    }
  }
}

}  // namespace
}  // namespace ebb
