#include "offload/managed/use_order.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

using Where = UseOrder::Where;
using Items = std::vector<UseHistory::Item>;

Items last_first(UseOrder& order, Where where) {
  Items found;
  for (auto key = order.last(where, std::nullopt); key; key = order.last(where, key)) {
    found.push_back(key->item);
  }
  return found;
}

Items first_first(UseOrder& order, Where where) {
  Items found;
  std::size_t looks = 100;
  for (auto key = order.first(where, std::nullopt, looks); key; key = order.first(where, key, looks)) {
    found.push_back(key->item);
  }
  return found;
}

TEST_CASE("a use order has what is here and what is away by the next use", "[managed]") {
  constexpr UseOrder::Item kItems = 7;
  UseOrder order;
  for (UseOrder::Item item = 0; item < kItems; ++item) {
    order.add(item);
  }
  CHECK(last_first(order, Where::kHere).empty());
  for (const UseOrder::Item item : {6, 5, 1, 2, 0, 6}) {  // 5 is expected next
    order.use(item, 1, 0);
  }
  for (const UseOrder::Item item : {0, 1, 3, 4}) {
    order.put(item, Where::kHere);
  }
  order.put(2, Where::kAway);
  order.put(5, Where::kAway);
  CHECK(last_first(order, Where::kHere) == Items{3, 4, 0, 1});
  CHECK(first_first(order, Where::kAway) == Items{5, 2});
  order.put(3, Where::kAway);
  order.put(4, Where::kNowhere);
  CHECK(last_first(order, Where::kHere) == Items{0, 1});
  CHECK(first_first(order, Where::kAway) == Items{5, 2, 3});
  order.use(2, 1, 0);  // instead of 5: the history goes on from another place, where 0 comes next
  CHECK(last_first(order, Where::kHere) == Items{0, 1, 0});  // 1 turns out to be used last of all
  CHECK(last_first(order, Where::kHere) == Items{1, 0});
  CHECK(first_first(order, Where::kAway) == Items{5, 3});
}

TEST_CASE("a look for what is used first ends after so many keys", "[managed]") {
  constexpr UseOrder::Item kItems = 1000;
  UseOrder order;
  for (UseOrder::Item item = 0; item < kItems; ++item) {
    order.add(item);
    order.put(item, Where::kAway);
  }
  for (const int times : {1, 2}) {
    for (UseOrder::Item item = 0; item < kItems; ++item) {
      order.use(item, static_cast<std::uint64_t>(times), 0);
      order.put(item, Where::kAway);
    }
  }
  order.use(kItems / 2, 1, 0);  // a jump: the next use of everything is another
  std::size_t looks = 10;
  CHECK_FALSE(order.first(Where::kAway, std::nullopt, looks));
  CHECK(looks == 0);
}

}  // namespace
}  // namespace ebb
