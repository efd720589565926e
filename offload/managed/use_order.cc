#include "offload/managed/use_order.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebb {
namespace {

constexpr std::size_t kLongestMatch = 32;  // uses that are compared
constexpr std::size_t kMostPlaces = 16;    // earlier uses of an item that are compared with the last one

constexpr std::size_t kLeastUses = std::size_t{1} << 17;  // that are remembered
constexpr std::size_t kUsesOfAnItem = 64;                 // the same, for each item

}  // namespace

bool UseHistory::use(Item item, std::uint64_t bytes, std::uint64_t window) {
  if (!uses_.empty() && uses_.back().item == item) {
    return false;
  }
  if (item >= places_.size()) {
    places_.resize(item + 1);
  }
  if (uses_.size() >= most_uses_.value_or(std::max(kLeastUses, kUsesOfAnItem * places_.size()))) {
    forget_oldest();
  }
  const std::uint64_t so_far = uses_.empty() ? 0 : uses_.back().bytes;
  const bool is_counted = places_[item].empty() || so_far - uses_[places_[item].back() - first_].bytes >= window;
  places_[item].push_back(end());
  uses_.push_back({item, so_far + (is_counted ? bytes : 0)});
  const bool goes_on = like_now_ != kNowhere && like_now_ + 1 < end() - 1 && at(like_now_ + 1) == item;
  like_now_ = goes_on ? like_now_ + 1 : place_like_now();
  return true;
}

// Of the latest earlier uses of the item that was used last, the place whose past is longest the same as now.
UseHistory::Place UseHistory::place_like_now() const {
  const std::deque<Place>& places = places_[uses_.back().item];
  Place best = kNowhere;
  std::size_t best_length = 0;
  const std::size_t count = std::min(places.size() - 1, kMostPlaces);
  for (std::size_t i = 0; i < count; ++i) {
    const Place place = places[places.size() - 2 - i];
    const std::size_t length = common_length(place);
    if (length > best_length) {
      best = place;
      best_length = length;
    }
  }
  return best;
}

std::size_t UseHistory::common_length(Place place) const {
  std::size_t length = 0;
  const Place now = end() - 1;
  while (length < kLongestMatch && place >= first_ + length && at(place - length) == at(now - length)) {
    ++length;
  }
  return length;
}

UseHistory::Place UseHistory::next_place(Item item) const {
  if (like_now_ == kNowhere || item >= places_.size()) {
    return kNever;
  }
  const std::deque<Place>& places = places_[item];
  const auto next = std::ranges::upper_bound(places, like_now_);
  return next == places.end() ? kNever : *next;
}

void UseHistory::forget_oldest() {
  places_[uses_.front().item].pop_front();
  uses_.pop_front();
  ++first_;
  if (like_now_ != kNowhere && like_now_ < first_) {
    like_now_ = kNowhere;
  }
}

void UseOrder::add(Item item) {
  if (item >= known_.size()) {
    known_.resize(item + 1);
  }
  Known& known = known_[item];
  known.key.item = item;
  keys(known.where).insert(known.key);
}

bool UseOrder::use(Item item, std::uint64_t bytes, std::uint64_t window) {
  const bool is_news = history_.use(item, bytes, window);
  put(item, Where::kNowhere);
  constexpr int kSortedInAUse = 4;
  for (int i = 0; i < kSortedInAUse; ++i) {
    sorted_in_ = (sorted_in_ + 1) % known_.size();
    static_cast<void>(is_right(known_[sorted_in_].key));
  }
  return is_news;
}

void UseOrder::put(Item item, Where where) noexcept {
  const Place next = history_.next_place(item);
  Known& known = known_[item];
  if (known.where == where && known.key.next == next) {
    return;
  }
  Keys::node_type node = keys(known.where).extract(known.key);
  known = {{next, item}, where};
  node.value() = known.key;
  keys(where).insert(std::move(node));
}

// Otherwise sorts the item in: where the history goes on from another place, the next use of everything is another.
bool UseOrder::is_right(const Key& key) noexcept {
  const bool is_right = history_.next_place(key.item) == key.next;
  if (!is_right) {
    put(key.item, known_[key.item].where);
  }
  return is_right;
}

std::optional<UseOrder::Key> UseOrder::last(Where where, const std::optional<Key>& before) {
  while (true) {
    const auto found = before ? keys(where).upper_bound(*before) : keys(where).begin();
    if (found == keys(where).end()) {
      return std::nullopt;
    }
    const Key key = *found;
    if (is_right(key)) {
      return key;
    }
    if (const Key now = known_[key.item].key; before && now < *before) {  // perhaps used last of all
      return now;
    }
  }
}

std::optional<UseOrder::Key> UseOrder::first(Where where, const std::optional<Key>& after, std::size_t& looks) {
  for (; looks > 0; --looks) {
    const auto end = after ? keys(where).lower_bound(*after) : keys(where).end();
    if (end == keys(where).begin()) {
      return std::nullopt;
    }
    if (const Key key = *std::prev(end); is_right(key)) {
      return key;
    }
  }
  return std::nullopt;
}

}  // namespace ebb
