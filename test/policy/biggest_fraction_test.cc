#include "policy/biggest_fraction.h"

#include <limits>
#include <stdexcept>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/minimum_size.h"
#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

using Sizes = std::vector<std::uint64_t>;

// The sizes of the storages that a step offloads, in order of saving.
Sizes offloaded(Policy& policy, const Sizes& sizes) {
  policy.begin_step();
  Sizes result;
  for (const std::uint64_t bytes : sizes) {
    if (policy.decide(of_size(bytes)) == Decision::kOffload) {
      result.push_back(bytes);
    }
  }
  return result;
}

TEST_CASE("the first step offloads everything, later ones the biggest fraction by count") {
  const auto policy = biggest_fraction(0.2);
  const Sizes sizes{10, 70, 30, 90, 50, 20, 80, 40, 60, 15};
  CHECK(offloaded(*policy, sizes) == sizes);
  CHECK(offloaded(*policy, sizes) == Sizes{90, 80});
  CHECK(offloaded(*policy, sizes) == Sizes{90, 80});
}

TEST_CASE("the whole fraction offloads every storage of a repeated step") {
  const auto policy = biggest_fraction(1);
  const Sizes sizes{3, 1, 2, 1};
  (void)offloaded(*policy, sizes);
  CHECK(offloaded(*policy, sizes) == sizes);
}

TEST_CASE("of storages as big as the smallest that passes, the first ones saved go until the count is reached") {
  const auto policy = biggest_fraction(0.5);
  const Sizes sizes{7, 9, 7, 1, 7, 7, 2, 3};
  (void)offloaded(*policy, sizes);
  for (int step = 0; step < 3; ++step) {
    CHECK(offloaded(*policy, sizes) == Sizes{7, 9, 7, 7});
  }
  policy->begin_step();
  std::vector<bool> by_ordinal;
  for (const std::uint64_t bytes : sizes) {
    by_ordinal.push_back(policy->decide(of_size(bytes)) == Decision::kOffload);
  }
  CHECK(by_ordinal == std::vector<bool>{true, true, true, false, true, false, false, false});
}

TEST_CASE("at least one storage goes, however small the fraction") {
  const auto policy = biggest_fraction(1e-9);
  (void)offloaded(*policy, {1, 3, 2});
  CHECK(offloaded(*policy, {1, 3, 2}) == Sizes{3});
}

TEST_CASE("a fraction that floating point cannot hold exactly gives the count that was meant") {
  const double fraction = GENERATE(0.07, 0.29, 0.57, 0.58);
  const auto policy = biggest_fraction(fraction);
  Sizes sizes;
  for (std::uint64_t bytes = 1; bytes <= 100; ++bytes) {
    sizes.push_back(bytes);
  }
  (void)offloaded(*policy, sizes);
  CHECK(static_cast<double>(offloaded(*policy, sizes).size()) == Approx(100 * fraction));
}

TEST_CASE("what is big is learned anew from every step, but not from one that saved nothing") {
  const auto policy = biggest_fraction(0.5);
  (void)offloaded(*policy, {1, 2, 3, 4});
  CHECK(offloaded(*policy, {10, 20, 30, 40}) == Sizes{10, 20, 30, 40});
  CHECK(offloaded(*policy, {}).empty());
  CHECK(offloaded(*policy, {10, 20, 30, 40}) == Sizes{30, 40});
}

TEST_CASE("storages that the inner policy keeps are ranked with the others") {
  const auto policy = biggest_fraction(0.5, minimum_size(4));
  CHECK(offloaded(*policy, {1, 2, 3, 4, 5, 6, 0, 0}) == Sizes{4, 5, 6});
  CHECK(offloaded(*policy, {1, 2, 3, 4, 5, 6, 0, 0}) == Sizes{4, 5, 6});
  CHECK(offloaded(*policy, {1, 2, 3, 4, 5, 6}) == Sizes{4, 5, 6});
  CHECK(offloaded(*policy, {1, 2, 3, 4, 5, 6}) == Sizes{4, 5, 6});
  CHECK(offloaded(*policy, {6, 6, 6, 6, 6, 6}) == Sizes{6, 6, 6, 6, 6, 6});
}

TEST_CASE("a fraction outside (0, 1] is refused with its value") {
  const double fraction = GENERATE(0.0, -0.2, 1.001, std::numeric_limits<double>::quiet_NaN());
  CHECK_THROWS_AS(biggest_fraction(fraction), std::invalid_argument);
  CHECK_THROWS_WITH(biggest_fraction(-0.2), Catch::Contains("-0.2"));
}

}  // namespace
}  // namespace ebb
