#include "policy/managed_replay.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace ebb {
namespace {

using Event = ManagedPeriod::Event;
using Kind = ManagedPeriod::Event::Kind;

// How many uses later each use's item is used next, in the same period or the following one.
std::vector<std::size_t> next_uses(std::span<const ManagedUse> uses) {
  std::vector<std::size_t> next(uses.size());
  std::unordered_map<std::uint32_t, std::size_t> later;
  for (std::size_t i = 2 * uses.size(); i-- > 0;) {
    const std::uint32_t item = uses[i % uses.size()].item;
    if (i < uses.size()) {
      next[i] = later.at(item) - i;  // the second period has every item
    }
    later[item] = i;
  }
  return next;
}

class Replay {
 public:
  Replay(std::span<const ManagedUse> uses, std::uint64_t limit) : uses_(uses), limit_(limit), next_(next_uses(uses)) {}

  ManagedPeriod pass_period() {
    Phase phase = Phase::kForward;
    hold(phase, phase);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      hold(phase, uses_[i].phase);
      phase = uses_[i].phase;
      use(i);
      hold(phase, phase);
      if (uses_[(i + next_[i]) % uses_.size()].is_new) {  // this was the storage's last use
        add({.kind = Kind::kEnd, .phase = phase, .bytes = uses_[i].bytes});
        forget(there_.find(uses_[i].item));
      }
    }
    hold(phase, Phase::kBetween);
    begin_ += uses_.size();
    return std::exchange(period_, {});
  }

 private:
  using Place = std::size_t;  // counts uses from the first period's beginning

  struct There {
    std::uint64_t bytes;
    Place next;             // the next use
    std::size_t operation;  // the last one that used the storage
    bool written;
  };

  void add(const Event& event) {
    const bool fetched = event.kind == Kind::kFetch;
    if (fetched || (event.kind == Kind::kLeave && event.written)) {
      ManagedTraffic& traffic = period_.traffic;
      ManagedTraffic::Lane& lane = (fetched ? traffic.in : traffic.out)[static_cast<std::size_t>(event.phase)];
      lane.bytes += event.bytes;
      ++lane.copies;
    }
    period_.events.push_back(event);
  }

  // As many bytes as now are on the device in these phases, and in those between them.
  void hold(Phase from, Phase to) {
    for (auto phase = static_cast<std::size_t>(from); phase <= static_cast<std::size_t>(to); ++phase) {
      period_.traffic.peak_bytes[phase] = std::max(period_.traffic.peak_bytes[phase], held_);
    }
  }

  void use(std::size_t i) {
    const ManagedUse& use = uses_[i];
    if (i == 0 || use.operation != uses_[i - 1].operation) {
      begin_operation(use.phase);
    }
    const auto known = there_.find(use.item);
    const bool is_there = known != there_.end();
    const bool written = use.written || (is_there && known->second.written);
    if (is_there) {
      forget(known);
    }
    make_room(use);
    if (use.is_new || !is_there) {
      const Kind kind = use.is_new ? Kind::kMake : Kind::kFetch;
      add({.kind = kind, .phase = use.phase, .bytes = use.bytes, .use = i});
    }
    const Place next = begin_ + i + next_[i];
    there_.insert_or_assign(use.item, There{use.bytes, next, operations_ - 1, written});
    in_use_.emplace_back(next, use.item);
    held_ += use.bytes;
  }

  void begin_operation(Phase phase) {
    ++operations_;
    for (const auto& [next, item] : in_use_) {
      if (const auto there = there_.find(item); there != there_.end() && there->second.next == next) {
        order_.emplace(next, item);
      }
    }
    in_use_.clear();
    add({.kind = Kind::kBegin, .phase = phase});
  }

  void make_room(const ManagedUse& use) {
    while (held_ + use.bytes > limit_ && !order_.empty()) {
      const auto leaves = there_.find(order_.rbegin()->second);
      const There& there = leaves->second;
      add({.kind = Kind::kLeave,
           .phase = use.phase,
           .bytes = there.bytes,
           .written = there.written,
           .last_operation = there.operation});
      forget(leaves);
    }
  }

  void forget(std::unordered_map<std::uint32_t, There>::iterator there) {
    order_.erase({there->second.next, there->first});
    held_ -= there->second.bytes;
    there_.erase(there);
  }

  const std::span<const ManagedUse> uses_;
  const std::uint64_t limit_;
  const std::vector<std::size_t> next_;
  std::unordered_map<std::uint32_t, There> there_;
  std::set<std::pair<Place, std::uint32_t>> order_;      // by next use: what may leave
  std::vector<std::pair<Place, std::uint32_t>> in_use_;  // of the present operation, which may not
  std::uint64_t held_ = 0;
  Place begin_ = 0;             // of the period
  std::size_t operations_ = 0;  // that have begun
  ManagedPeriod period_;
};

}  // namespace

std::vector<ManagedPeriod> replay_periods(std::span<const ManagedUse> uses, std::uint64_t limit, int count) {
  Replay replay(uses, limit);
  std::vector<ManagedPeriod> periods;
  for (int i = 0; i < count; ++i) {
    periods.push_back(replay.pass_period());
  }
  return periods;
}

std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase) {
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < uses.size();) {
    std::uint64_t bytes = 0;
    const std::uint32_t operation = uses[i].operation;
    for (; i < uses.size() && uses[i].operation == operation; ++i) {
      bytes += uses[i].phase == phase ? uses[i].bytes : 0;
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace ebb
