#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
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
  [[nodiscard]] std::uint64_t bytes_until(Place next) const;

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

}  // namespace ebb
