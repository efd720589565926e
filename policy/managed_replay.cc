#include "policy/managed_replay.h"

namespace ebb {

void ManagedReplay::pass_period(Observer& observer) {
  Phase phase = Phase::kForward;
  observer.hold(phase, phase, held_);
  for (std::size_t i = 0; i < uses_.size(); ++i) {
    observer.hold(phase, uses_[i].phase, held_);
    phase = uses_[i].phase;
    use(i, observer);
  }
  observer.hold(phase, Phase::kBetween, held_);
  begin_ += uses_.size();
}

// In the same period or the following one.
std::vector<std::size_t> ManagedReplay::next_uses() const {
  std::vector<std::size_t> next(uses_.size());
  std::unordered_map<std::uint32_t, std::size_t> later;
  for (std::size_t i = 2 * uses_.size(); i-- > 0;) {
    const std::uint32_t item = uses_[i % uses_.size()].item;
    if (i < uses_.size()) {
      next[i] = later.at(item) - i;  // the second period has every item
    }
    later[item] = i;
  }
  return next;
}

void ManagedReplay::use(std::size_t i, Observer& observer) {
  const ManagedUse& use = uses_[i];
  if (i == 0 || use.operation != uses_[i - 1].operation) {
    ++operations_;
    for (const auto& [next, item] : in_use_) {
      if (const auto there = there_.find(item); there != there_.end() && there->second.next == next) {
        order_.emplace(next, item);
      }
    }
    in_use_.clear();
    observer.begin_operation(use);
  }
  const auto known = there_.find(use.item);
  const bool is_there = known != there_.end();
  bool written = use.written;
  if (is_there) {
    written = written || known->second.written;
    forget(known);
  }
  make_room(use, observer);
  if (use.is_new) {
    observer.make(use);
  } else if (!is_there) {
    observer.fetch(use);
  }
  const Place next = begin_ + i + next_[i];
  there_.insert_or_assign(use.item, There{use.bytes, next, operations_ - 1, written});
  in_use_.emplace_back(next, use.item);
  held_ += use.bytes;
  observer.hold(use.phase, use.phase, held_);
  if (uses_[(i + next_[i]) % uses_.size()].is_new) {  // this was the storage's last use
    observer.end_storage(use.bytes);
    forget(there_.find(use.item));
  }
}

void ManagedReplay::make_room(const ManagedUse& use, Observer& observer) {
  while (held_ + use.bytes > limit_ && !order_.empty()) {
    const auto leaves = there_.find(order_.rbegin()->second);
    observer.leave(use, leaves->second.bytes, leaves->second.written, leaves->second.operation);
    forget(leaves);
  }
}

void ManagedReplay::forget(std::unordered_map<std::uint32_t, There>::iterator there) {
  order_.erase({there->second.next, there->first});
  held_ -= there->second.bytes;
  there_.erase(there);
}

}  // namespace ebb
