#include "offload/managed/use_history.h"

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
  Items found;
  history.expect([&](UseHistory::Item item) {
    found.push_back(item);
    return found.size() < most;
  });
  return found;
}

TEST_CASE("a use history expects nothing before the program has repeated itself", "[managed]") {
  UseHistory history;
  CHECK(expected(history).empty());
  use(history, {0, 1, 2});
  CHECK(expected(history).empty());
  CHECK(history.next_use(1) == UseHistory::kNever);
  CHECK(history.next_use(7) == UseHistory::kNever);
}

TEST_CASE("a use history expects what came after the same place, each item once", "[managed]") {
  UseHistory history;
  use(history, {0, 1, 2, 3, 2, 1, 0, 4});
  use(history, {0, 1});
  CHECK(expected(history) == Items{2, 3, 1, 0, 4});
  CHECK(expected(history, 2) == Items{2, 3});
  CHECK(history.next_use(2) == 1);
  CHECK(history.next_use(3) == 2);
  CHECK(history.next_use(4) == 6);
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

}  // namespace
}  // namespace ebb
