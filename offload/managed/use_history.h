#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace ebb {

// The order in which a program uses its managed storages, and what the order so far says of the next uses. A training
// loop repeats itself: the history is followed from the latest place where it went as it does now, and what came after
// that place is expected again. So nobody has to say where a step begins, and forward, backward, the optimizer and
// evaluation are learned alike.
//
// A wrong expectation costs time, never correctness.
//
// Threads: one at a time.
class UseHistory {
 public:
  using Item = std::uint32_t;  // small numbers, without many gaps

  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // `most_uses`: how many uses are remembered, at least 2. A step with more uses than half of that is not learned.
  explicit UseHistory(std::size_t most_uses = std::size_t{1} << 17);

  // Notes a use. Uses of one item in a row count as one: returns whether this one counts.
  bool use(Item item);

  // Calls `visit` with what is expected next, the nearest first and each item once, until `visit` returns false. Calls
  // nothing where the history has never gone as it does now.
  void expect(const std::function<bool(Item)>& visit) const;

  // How many uses from now the item is expected; kNever where it is not expected at all.
  [[nodiscard]] std::uint64_t next_use(Item item) const;

 private:
  using Place = std::uint64_t;  // counts all uses since the beginning

  static constexpr Place kNowhere = ~Place{0};

  [[nodiscard]] Place end() const { return first_ + uses_.size(); }
  [[nodiscard]] Item at(Place place) const { return uses_[place - first_]; }
  [[nodiscard]] Place place_like_now() const;
  [[nodiscard]] std::size_t common_length(Place place) const;
  void forget_oldest();

  const std::size_t most_uses_;
  std::deque<Item> uses_;
  Place first_ = 0;                             // of uses_.front()
  std::vector<std::deque<Place>> places_;       // of each item, in order
  Place like_now_ = kNowhere;                   // the place before the last where the history went as it does now
  mutable std::vector<std::uint64_t> visited_;  // for expect: the number of the call that visited each item last
  mutable std::uint64_t calls_ = 0;
};

}  // namespace ebb
