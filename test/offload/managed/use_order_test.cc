#include "offload/managed/use_order.h"

#include <optional>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

using Where = UseOrder::Where;
using Items = std::vector<UseHistory::Item>;

Items last_first(const UseOrder& order, Where where) {
  Items found;
  for (auto key = order.last(where, std::nullopt); key; key = order.last(where, key)) {
    found.push_back(key->item);
  }
  return found;
}

Items first_first(const UseOrder& order, Where where) {
  Items found;
  for (auto key = order.first(where, std::nullopt); key; key = order.first(where, key)) {
    found.push_back(key->item);
  }
  return found;
}

TEST_CASE("a use order has what is here and what is away by the next use", "[managed]") {
  UseOrder order;
  for (UseHistory::Item item = 0; item < 6; ++item) {
    order.add(item);
  }
  CHECK(last_first(order, Where::kHere).empty());
  order.put(0, Where::kHere, 7);
  order.put(1, Where::kHere, 3);
  order.put(2, Where::kAway, 5);
  order.put(3, Where::kHere, UseHistory::kNever);
  order.put(4, Where::kHere, UseHistory::kNever);
  order.put(5, Where::kAway, 2);
  CHECK(last_first(order, Where::kHere) == Items{3, 4, 0, 1});
  CHECK(first_first(order, Where::kAway) == Items{5, 2});
  order.put(0, Where::kHere, 1);
  order.put(3, Where::kAway, 4);
  order.put(4, Where::kNowhere, 0);
  CHECK(last_first(order, Where::kHere) == Items{1, 0});
  CHECK(first_first(order, Where::kAway) == Items{5, 3, 2});
  order.add(4);
  order.put(4, Where::kHere, 9);
  CHECK(last_first(order, Where::kHere) == Items{4, 1, 0});
}

}  // namespace
}  // namespace ebb
