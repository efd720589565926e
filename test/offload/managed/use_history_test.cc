#include "offload/managed/use_order.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

using Items = std::vector<UseHistory::Item>;

void use(UseHistory& history, const Items& items) {
  for (const UseHistory::Item item : items) {
    history.use(item);
  }
}

Items expected(const UseHistory& history, std::size_t most = 100) {
  constexpr UseHistory::Item kItems = 100;
  Items found;
  for (UseHistory::Item item = 0; item < kItems; ++item) {
    if (history.next_place(item) != UseHistory::kNever) {
      found.push_back(item);
    }
  }
  std::ranges::sort(found, {}, [&](UseHistory::Item item) { return history.next_place(item); });
  found.resize(std::min(found.size(), most));
  return found;
}

std::uint64_t next_use(const UseHistory& history, UseHistory::Item item) {
  return history.uses_until(history.next_place(item));
}

TEST_CASE("a use history expects nothing before the program has repeated itself", "[managed]") {
  UseHistory history;
  CHECK(expected(history).empty());
  use(history, {0, 1, 2});
  CHECK(expected(history).empty());
  CHECK(next_use(history, 1) == UseHistory::kNever);
  CHECK(next_use(history, 7) == UseHistory::kNever);
}

TEST_CASE("a use history expects what came after the same place, each item once", "[managed]") {
  UseHistory history;
  use(history, {0, 1, 2, 3, 2, 1, 0, 4});
  use(history, {0, 1});
  CHECK(expected(history) == Items{2, 3, 1, 0, 4});
  CHECK(expected(history, 2) == Items{2, 3});
  CHECK(next_use(history, 2) == 1);
  CHECK(next_use(history, 3) == 2);
  CHECK(next_use(history, 4) == 6);
}

TEST_CASE("a use history tells forward from backward by what came before", "[managed]") {
  UseHistory history;
  use(history, {0, 1, 2, 3, 2, 1, 0});
  use(history, {5, 0, 1, 2, 3, 2});
  CHECK(expected(history, 2) == Items{1, 0});
  use(history, {1, 0, 5, 0, 1, 2});
  CHECK(expected(history, 2) == Items{3, 2});
}

TEST_CASE("uses of one item in a row count as one", "[managed]") {
  UseHistory history;
  use(history, {0, 0, 0, 1, 2, 0, 1, 1});
  CHECK(expected(history) == Items{2, 0, 1});
}

TEST_CASE("a use history finds its way again after an excursion", "[managed]") {
  UseHistory history;
  use(history, {0, 1, 2, 3, 4});
  use(history, {0, 1, 9, 2});
  CHECK(expected(history, 2) == Items{3, 4});
}

TEST_CASE("a use history forgets the oldest uses", "[managed]") {
  UseHistory history(4);
  use(history, {0, 1, 2, 3, 4, 5, 0});
  CHECK(expected(history).empty());
  use(history, {4, 5, 4});
  CHECK(expected(history, 1) == Items{5});
  for (UseHistory::Item i = 0; i < 1000; ++i) {
    use(history, {i % 3});
  }
  CHECK(expected(history) == Items{1, 2, 0});
}

TEST_CASE("a use history counts the bytes until a use, an item once within a window", "[managed]") {
  UseHistory history;
  for (int period = 0; period < 2; ++period) {
    for (const UseHistory::Item item : {0, 1, 0, 2, 3}) {
      history.use(item, /*bytes=*/10, /*window=*/15);
    }
  }
  CHECK(history.bytes_until(history.next_place(0)) == 10);
  CHECK(history.bytes_until(history.next_place(1)) == 20);
  CHECK(history.bytes_until(history.next_place(2)) == 30);
}

TEST_CASE("a use history remembers more uses where there are more items", "[managed]") {
  constexpr UseHistory::Item kItems = 1 << 15;
  UseHistory history;
  for (int use = 0; use < 5; ++use) {
    for (UseHistory::Item item = 0; item < kItems; ++item) {
      history.use(item);
    }
  }
  history.use(0);
  CHECK(next_use(history, kItems - 1) == kItems - 1);
}

}  // namespace
}  // namespace ebb
