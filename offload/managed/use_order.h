#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "offload/managed/use_history.h"

namespace ebb {

// Items in the order of their next uses: those that are here, those that are away, and the others. Each call takes time
// that grows with the logarithm of their number.
//
// Threads: one at a time.
class UseOrder {
 public:
  enum class Where : std::uint8_t { kHere, kAway, kNowhere };

  struct Key {
    UseHistory::Place next;
    UseHistory::Item item;

    // The last use first; of equal ones, the item that has been there longest.
    friend bool operator<(const Key& a, const Key& b) { return a.next != b.next ? a.next > b.next : a.item < b.item; }
  };

  // Makes room for the item, for which put() may then be called. Nowhere at first.
  void add(UseHistory::Item item);

  // Says where the item is, and its next use.
  void put(UseHistory::Item item, Where where, UseHistory::Place next) noexcept;

  // Of those there, the key that is used last, or last before `before`; the one that is used first, or first after
  // `after`. nullopt: there is none.
  [[nodiscard]] std::optional<Key> last(Where where, const std::optional<Key>& before) const;
  [[nodiscard]] std::optional<Key> first(Where where, const std::optional<Key>& after) const;

 private:
  using Keys = std::set<Key>;

  struct Known {
    Key key{};
    Where where = Where::kNowhere;
  };

  [[nodiscard]] Keys& keys(Where where) { return keys_[static_cast<std::size_t>(where)]; }
  [[nodiscard]] const Keys& keys(Where where) const { return keys_[static_cast<std::size_t>(where)]; }

  std::array<Keys, 3> keys_;  // by Where
  std::vector<Known> known_;  // by item
};

}  // namespace ebb
