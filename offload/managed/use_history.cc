#include "offload/managed/use_history.h"

#include <algorithm>

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

std::uint64_t UseHistory::bytes_until(Place next) const {
  return next == kNever ? kNever : uses_[next - first_].bytes - uses_[like_now_ - first_].bytes;
}

void UseHistory::forget_oldest() {
  places_[uses_.front().item].pop_front();
  uses_.pop_front();
  ++first_;
  if (like_now_ != kNowhere && like_now_ < first_) {
    like_now_ = kNowhere;
  }
}

}  // namespace ebb
