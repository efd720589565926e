#include "offload/steps/expected_uses.h"

#include <algorithm>
#include <utility>

namespace ebb {

void ExpectedUses::forget() {
  const std::uint64_t resets = resets_ + 1;
  *this = {};
  resets_ = resets;
}

void ExpectedUses::expect(std::vector<std::uint32_t> order) {
  forget();
  order_ = std::move(order);
  rank_.resize(order_.size());
  for (std::uint32_t rank = 0; rank < order_.size(); ++rank) {
    rank_[order_[rank]] = rank;
  }
  used_in_.assign(order_.size(), 0);
}

void ExpectedUses::expect(const Plan& plan, const std::vector<std::uint32_t>& ordinals) {
  const PrefetchSchedule& room = plan.schedule.backward;
  const std::size_t planned = plan.decisions.size();
  std::vector<std::uint32_t> index_of(planned, kNotPlanned);
  for (std::uint32_t index = 0; index < ordinals.size(); ++index) {
    if (ordinals[index] < planned) {
      index_of[ordinals[index]] = index;
    }
  }
  std::vector<bool> listed(ordinals.size(), false);
  std::vector<std::uint32_t> order;
  std::vector<std::uint32_t> last_part;
  for (const PrefetchSchedule::CopyIn& copy : room.copies_in) {
    if (const std::uint32_t index = index_of[copy.storage]; index != kNotPlanned) {
      listed[index] = true;
      order.push_back(index);
      last_part.push_back(copy.last_part);
    }
  }
  for (std::size_t index = listed.size(); index-- > 0;) {
    if (!listed[index]) {
      order.push_back(static_cast<std::uint32_t>(index));
      last_part.push_back(kNotPlanned);
    }
  }
  expect(std::move(order));
  last_part_ = std::move(last_part);
  part_of_.assign(planned, 0);
  for (std::uint32_t k = 0; k < room.needed.size(); ++k) {
    part_of_[room.needed[k]] = k + 1;
  }
  held_bytes_.emplace(room.held_bytes);
}

void ExpectedUses::asked(std::uint32_t ordinal) {
  if (ordinal < part_of_.size()) {
    part_ = std::max(part_, part_of_[ordinal]);  // backward may ask for a candidate again
  }
}

void ExpectedUses::used(std::uint32_t index) {
  if (used_in_[index] == pass_) {  // backward runs over this graph again
    ++pass_;
    look_again();
    device_is_full_ = false;
    part_ = 0;
  }
  used_in_[index] = pass_;
  if (rank_[index] != cursor_) {  // an unexpected use: storages that were passed over are looked at again
    look_again();
  }
  cursor_ = rank_[index] + 1;
  if (pass_ == kFirstPass) {
    observed_.push_back(index);
  }
}

std::optional<ExpectedUses::Next> ExpectedUses::next(std::size_t from) const {
  std::size_t rank = std::max({from, cursor_, device_is_full_ ? 0 : prefetched_to_});
  while (rank < order_.size() && used_in_[order_[rank]] == pass_) {
    ++rank;
  }
  return rank == order_.size() ? std::nullopt : std::optional(Next{rank, order_[rank], resets_, held_bytes(rank)});
}

bool ExpectedUses::starts(const Next& next) {
  if (device_is_full_ && next.rank < prefetched_to_) {
    return false;
  }
  prefetched_to_ = next.rank;
  return true;
}

void ExpectedUses::prefetched(const Next& next) {
  if (resets_ == next.resets) {
    prefetched_to_ = std::max(prefetched_to_, next.rank + 1);
  }
}

void ExpectedUses::is_cancelled(bool device_is_full) {
  look_again();
  device_is_full_ = device_is_full_ || device_is_full;
}

void ExpectedUses::look_again() {
  prefetched_to_ = 0;
  ++resets_;
}

std::optional<std::uint64_t> ExpectedUses::held_bytes(std::size_t rank) const {
  if (!held_bytes_) {
    return std::nullopt;
  }
  const std::uint32_t last_part = last_part_[rank];
  return last_part == kNotPlanned ? 0 : (*held_bytes_)(std::min(part_, last_part), last_part);
}

}  // namespace ebb
