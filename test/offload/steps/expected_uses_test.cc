#include "offload/steps/expected_uses.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

using Indices = std::vector<std::uint32_t>;

// What would be prefetched now, one after the other, if nothing stopped it.
Indices prefetch_all(ExpectedUses& expected) {
  Indices prefetched;
  std::optional<ExpectedUses::Next> next;
  while ((next = expected.next(0)) && expected.starts(*next)) {
    prefetched.push_back(next->index);
    expected.prefetched(*next);
  }
  return prefetched;
}

TEST_CASE("what is expected is prefetched once, in its order, and not what has been used", "[prefetch]") {
  ExpectedUses expected;
  expected.expect({2, 0, 3, 1});
  expected.used(2);
  CHECK(prefetch_all(expected) == Indices{0, 3, 1});
  CHECK(prefetch_all(expected).empty());
  CHECK(expected.observed() == Indices{2});
}

TEST_CASE("after an unexpected use what was passed over is looked at again", "[prefetch]") {
  ExpectedUses expected;
  expected.expect({0, 1, 2, 3});
  CHECK(prefetch_all(expected) == Indices{0, 1, 2, 3});
  expected.used(2);  // 0 and 1 are not expected any more
  CHECK(prefetch_all(expected) == Indices{3});
  expected.used(0);
  CHECK(prefetch_all(expected) == Indices{1, 3});
  CHECK(expected.observed() == Indices{2, 0});
}

TEST_CASE("a second pass over the graph expects everything again, and teaches no order", "[prefetch]") {
  ExpectedUses expected;
  expected.expect({1, 0});
  expected.used(1);
  expected.used(0);
  CHECK_FALSE(expected.next(0));
  expected.used(1);
  CHECK(prefetch_all(expected) == Indices{0});
  CHECK(expected.observed() == Indices{1, 0});
}

TEST_CASE("on a full device only what has not been prefetched before is", "[prefetch]") {
  ExpectedUses expected;
  expected.expect({0, 1, 2});
  const std::optional<ExpectedUses::Next> first = expected.next(0);
  REQUIRE(first);
  REQUIRE(expected.starts(*first));
  expected.prefetched(*first);
  expected.is_cancelled(/*device_is_full=*/true);
  CHECK(prefetch_all(expected) == Indices{0});  // the next need alone
  CHECK(prefetch_all(expected).empty());
  expected.used(0);
  CHECK(prefetch_all(expected) == Indices{1});
}

}  // namespace
}  // namespace ebb
