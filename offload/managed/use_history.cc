#include "offload/managed/use_history.h"

#include <algorithm>

namespace ebb {
namespace {

constexpr std::size_t kLongestMatch = 32;  // uses that are compared
constexpr std::size_t kMostPlaces = 16;    // earlier uses of an item that are compared with the last one

}  // namespace

UseHistory::UseHistory(std::size_t most_uses) : most_uses_(most_uses) {}

bool UseHistory::use(Item item) {
  if (!uses_.empty() && uses_.back() == item) {
    return false;
  }
  if (uses_.size() == most_uses_) {
    forget_oldest();
  }
  if (item >= places_.size()) {
    places_.resize(item + 1);
  }
  places_[item].push_back(end());
  uses_.push_back(item);
  const bool goes_on = like_now_ != kNowhere && like_now_ + 1 < end() - 1 && at(like_now_ + 1) == item;
  like_now_ = goes_on ? like_now_ + 1 : place_like_now();
  return true;
}

// Of the latest earlier uses of the item that was used last, the place whose past is longest the same as now.
UseHistory::Place UseHistory::place_like_now() const {
  const std::deque<Place>& places = places_[uses_.back()];
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

void UseHistory::expect(const std::function<bool(Item)>& visit) const {
  if (like_now_ == kNowhere) {
    return;
  }
  ++calls_;
  visited_.resize(places_.size());
  for (Place place = like_now_ + 1; place < end(); ++place) {
    const Item item = at(place);
    if (visited_[item] == calls_) {
      continue;
    }
    visited_[item] = calls_;
    if (!visit(item)) {
      return;
    }
  }
}

std::uint64_t UseHistory::next_use(Item item) const {
  if (like_now_ == kNowhere || item >= places_.size()) {
    return kNever;
  }
  const std::deque<Place>& places = places_[item];
  const auto next = std::ranges::upper_bound(places, like_now_);
  return next == places.end() ? kNever : *next - like_now_;
}

void UseHistory::forget_oldest() {
  places_[uses_.front()].pop_front();
  uses_.pop_front();
  ++first_;
  if (like_now_ != kNowhere && like_now_ < first_) {
    like_now_ = kNowhere;
  }
}

}  // namespace ebb
