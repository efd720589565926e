#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <vector>

namespace ebb {

// The order in which a program uses its managed storages, and what the order so far says of the next uses. A training
// loop repeats itself. The latest earlier place is found where the uses were the same as the last uses, and the uses
// behind that place are expected again. So nobody has to say where a step begins, and forward, backward, the optimizer
// and evaluation are learned alike.
//
// A wrong expectation costs time, never correctness.
//
// Threads: one at a time.
class UseHistory {
 public:
  using Item = std::uint32_t;   // small numbers, without many gaps
  using Place = std::uint64_t;  // counts all uses since the beginning

  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // `most_uses`: how many uses are remembered, at least 2; nullopt: 2^17, and more where there are more items. A step
  // with more uses than half of that is not learned.
  explicit UseHistory(std::optional<std::size_t> most_uses = std::nullopt) : most_uses_(most_uses) {}

  // Notes a use. Uses of one item in a row count as one: returns whether this one counts. `bytes`: for bytes_until(),
  // which counts an item once within `window` bytes.
  bool use(Item item, std::uint64_t bytes = 0, std::uint64_t window = 0);

  // Where in the history the item is expected next; kNever where it is not expected at all. Changes with a use of the
  // item, and where the history has gone on otherwise than was expected.
  [[nodiscard]] Place next_place(Item item) const;

  // How many uses from now that place is; how many bytes are used until then, and in that place.
  [[nodiscard]] std::uint64_t uses_until(Place next) const { return next == kNever ? kNever : next - like_now_; }
  [[nodiscard]] std::uint64_t bytes_until(Place next) const {
    return next == kNever ? kNever : uses_[next - first_].bytes - uses_[like_now_ - first_].bytes;
  }

 private:
  static constexpr Place kNowhere = ~Place{0};

  [[nodiscard]] Place end() const { return first_ + uses_.size(); }
  [[nodiscard]] Item at(Place place) const { return uses_[place - first_].item; }
  [[nodiscard]] Place place_like_now() const;
  [[nodiscard]] std::size_t common_length(Place place) const;
  void forget_oldest();

  struct Use {
    Item item;
    std::uint64_t bytes;  // of all uses so far, with this one
  };

  const std::optional<std::size_t> most_uses_;
  std::deque<Use> uses_;
  Place first_ = 0;                        // of uses_.front()
  std::vector<std::deque<Place>> places_;  // of each item, in order
  Place like_now_ = kNowhere;              // the place before the last where the history went as it does now
};

// Items in the order of their next uses, as a history expects these: the items that are here, those that are away, and
// the others. Each call takes time that grows with the logarithm of their number.
//
// Threads: one at a time.
class UseOrder {
 public:
  using Item = UseHistory::Item;
  using Place = UseHistory::Place;

  enum class Where : std::uint8_t { kHere, kAway, kNowhere };

  struct Key {
    Place next;
    Item item;

    // The last use first; of equal ones, the item that has been there longest.
    friend bool operator<(const Key& a, const Key& b) { return a.next != b.next ? a.next > b.next : a.item < b.item; }
  };

  // Makes room for the item, for which the other members may then be called. Nowhere at first. Items are added in their
  // order, from 0 on.
  void add(Item item);

  // As UseHistory's. The item is nowhere until the next put(). Also sorts a few other items in, in turn: after a jump
  // back in the history, what is used soon may be sorted as if used late, where nobody looks.
  bool use(Item item, std::uint64_t bytes, std::uint64_t window);

  // Says where the item is.
  void put(Item item, Where where) noexcept;

  // Of those there, the key that is used last, or last before `before`, or one that turns out to be used after
  // `before`; and the key that is used first, or first after `after`, for which at most `looks` keys are looked at, and
  // counted down. nullopt: there is none.
  [[nodiscard]] std::optional<Key> last(Where where, const std::optional<Key>& before);
  [[nodiscard]] std::optional<Key> first(Where where, const std::optional<Key>& after, std::size_t& looks);

  // As UseHistory's, of a key.
  [[nodiscard]] std::uint64_t uses_until(const Key& key) const { return history_.uses_until(key.next); }
  [[nodiscard]] std::uint64_t bytes_until(const Key& key) const { return history_.bytes_until(key.next); }

 private:
  using Keys = std::set<Key>;

  struct Known {
    Key key{};
    Where where = Where::kNowhere;
  };

  [[nodiscard]] Keys& keys(Where where) { return keys_[static_cast<std::size_t>(where)]; }
  bool is_right(const Key& key) noexcept;

  UseHistory history_;
  std::array<Keys, 3> keys_;   // by Where
  std::vector<Known> known_;   // by item
  std::size_t sorted_in_ = 0;  // the item that was looked at last
};

}  // namespace ebb
