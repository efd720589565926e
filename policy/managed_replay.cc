#include "policy/managed_replay.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>

namespace ebb {
namespace {

using Event = ManagedEvent;
using Kind = ManagedEvent::Kind;

// Periods before those that count: one to fill the device, and one in which lanes fall behind.
constexpr int kPeriodsBefore = 2;

// Periods that count. A lane that falls behind, and copies that go round, make them differ from one another.
constexpr int kPeriods = 4;

bool begins_operation(std::span<const ManagedUse> uses, std::size_t i) {
  return i == 0 || uses[i].operation != uses[i - 1].operation;
}

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

// For each use, how many operations earlier its storage is asked for: at the first operation from whose end on the
// storages that are used until then, each counted once, are within `ahead_bytes`. 0: they never are.
std::vector<std::size_t> asked_earlier(std::span<const ManagedUse> uses, std::uint64_t ahead_bytes) {
  const std::size_t n = uses.size();
  std::vector<std::size_t> begun;  // the operations that have begun at each use, over two periods
  for (std::size_t i = 0; i < 2 * n; ++i) {
    begun.push_back((begun.empty() ? 0 : begun.back()) + (begins_operation(uses, i % n) ? 1 : 0));
  }
  std::vector<std::size_t> earlier;
  std::unordered_map<std::uint32_t, std::size_t> times;  // of each item among the uses from `first` to i
  std::uint64_t bytes = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < 2 * n; ++i) {
    const ManagedUse& use = uses[i % n];
    bytes += times[use.item]++ == 0 ? use.bytes : 0;
    for (; first <= i && bytes > ahead_bytes; ++first) {
      const ManagedUse& gone = uses[first % n];
      bytes -= --times[gone.item] == 0 ? gone.bytes : 0;
    }
    if (i >= n) {
      const std::size_t not_within = first == 0 ? 0 : begun[first - 1];
      earlier.push_back(first > i ? 0 : std::min(begun[n - 1], begun[i] - not_within));
    }
  }
  return earlier;
}

// What is on the device, from period to period. The first one begins with an empty device, and the second has the
// traffic of the later ones.
class Replay {
 public:
  // `events`: gets what happens; null for nobody.
  Replay(std::span<const ManagedUse> uses, std::uint64_t limit, std::vector<Event>* events)
      : uses_(uses), limit_(limit), next_(next_uses(uses)), events_(events) {
    const auto last = std::ranges::max_element(uses, {}, &ManagedUse::item);
    items_.resize(last == uses.end() ? 0 : last->item + std::size_t{1});
  }

  ManagedTraffic pass_period() {
    traffic_ = {};
    Phase phase = Phase::kForward;
    hold(phase, phase);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      hold(phase, uses_[i].phase);
      phase = uses_[i].phase;
      use(i);
      hold(phase, phase);
      if (uses_[(i + next_[i]) % uses_.size()].is_new) {  // this was the storage's last use
        add({.kind = Kind::kEnd, .phase = phase, .bytes = uses_[i].bytes});
        forget(uses_[i].item);
      }
    }
    hold(phase, Phase::kBetween);
    begin_ += uses_.size();
    return traffic_;
  }

 private:
  using Place = std::size_t;  // counts uses from the first period's beginning

  struct Item {
    bool is_there = false;
    std::uint64_t bytes = 0;
    Place next = 0;             // the next use
    std::size_t operation = 0;  // the last one that used the storage
    bool written = false;
  };

  void add(const Event& event) {
    const bool fetched = event.kind == Kind::kFetch;
    if (fetched || (event.kind == Kind::kLeave && event.written)) {
      ManagedTraffic::Lane& lane = (fetched ? traffic_.in : traffic_.out)[static_cast<std::size_t>(event.phase)];
      lane.bytes += event.bytes;
      ++lane.copies;
    }
    if (events_ != nullptr) {
      events_->push_back(event);
    }
  }

  // As many bytes as now are on the device in these phases, and in those between them.
  void hold(Phase from, Phase to) {
    for (auto phase = static_cast<std::size_t>(from); phase <= static_cast<std::size_t>(to); ++phase) {
      traffic_.peak_bytes[phase] = std::max(traffic_.peak_bytes[phase], held_);
    }
  }

  void use(std::size_t i) {
    const ManagedUse& use = uses_[i];
    if (begins_operation(uses_, i)) {
      begin_operation(use.phase);
    }
    const Item before = items_[use.item];
    if (before.is_there) {
      forget(use.item);
    }
    make_room(use);
    if (use.is_new || !before.is_there) {
      const Kind kind = use.is_new ? Kind::kMake : Kind::kFetch;
      add({.kind = kind, .phase = use.phase, .bytes = use.bytes, .use = i});
    }
    const bool written = use.written || (before.is_there && before.written);
    items_[use.item] = {true, use.bytes, begin_ + i + next_[i], operations_ - 1, written};
    in_use_.push_back(use.item);
    held_ += use.bytes;
  }

  void begin_operation(Phase phase) {
    ++operations_;
    for (const std::uint32_t item : in_use_) {
      if (items_[item].is_there) {
        order_.emplace(items_[item].next, item);
      }
    }
    in_use_.clear();
    add({.kind = Kind::kBegin, .phase = phase});
  }

  void make_room(const ManagedUse& use) {
    while (held_ + use.bytes > limit_ && !order_.empty()) {
      const std::uint32_t last = order_.rbegin()->second;
      const Item& leaves = items_[last];
      add({.kind = Kind::kLeave,
           .phase = use.phase,
           .bytes = leaves.bytes,
           .written = leaves.written,
           .last_operation = leaves.operation});
      forget(last);
    }
  }

  void forget(std::uint32_t item) {
    order_.erase({items_[item].next, item});
    held_ -= items_[item].bytes;
    items_[item].is_there = false;
  }

  const std::span<const ManagedUse> uses_;
  const std::uint64_t limit_;
  const std::vector<std::size_t> next_;
  std::vector<Event>* const events_;
  std::vector<Item> items_;                          // by ManagedUse::item
  std::set<std::pair<Place, std::uint32_t>> order_;  // by next use: what may leave
  std::vector<std::uint32_t> in_use_;                // of the present operation: what may not
  std::uint64_t held_ = 0;
  Place begin_ = 0;             // of the period
  std::size_t operations_ = 0;  // that have begun
  ManagedTraffic traffic_;
};

// The device's clock and the lanes', and when which bytes of the bound are free.
class Clocks {
 public:
  // `operation_ms`: the compute of one operation.
  Clocks(std::uint64_t device_bytes, std::span<const std::size_t> asked_earlier, const EachPhase<double>& operation_ms,
         const LinkRates& rates)
      : asked_earlier_(asked_earlier), operation_ms_(operation_ms), link_(rates) {
    free_.push({0, device_bytes});
  }

  // How long the operations take that begin with the event `counted_from` or later, by phase.
  EachPhase<double> run(const std::vector<Event>& events, std::size_t counted_from) {
    EachPhase<double> phases{};
    for (std::size_t i = 0; i < events.size();) {
      const bool counts = i >= counted_from;
      const auto phase = static_cast<std::size_t>(events[i].phase);
      const double before_ms = end_ms();
      double arrived_ms = before_ms;
      std::uint64_t ended_bytes = 0;
      for (++i; i < events.size() && events[i].kind != Kind::kBegin; ++i) {
        const Event& event = events[i];
        if (event.kind == Kind::kEnd) {
          ended_bytes += event.bytes;
        } else if (event.kind == Kind::kLeave) {
          const double idle_ms = end_ms_[event.last_operation];
          give(event.written ? link_.copy_out(idle_ms, event.bytes) : idle_ms, event.bytes);
        } else {
          const double room_ms = take(event.bytes);
          if (event.kind == Kind::kFetch) {
            const double asked_ms = this->asked_ms(asked_earlier_[event.use]);
            arrived_ms = std::max(arrived_ms, link_.copy_in(std::max(room_ms, asked_ms), event.bytes));
          }
        }
      }
      begin_ms_.push_back(arrived_ms);
      end_ms_.push_back(arrived_ms + operation_ms_[phase]);
      give(end_ms(), ended_bytes);
      phases[phase] += counts ? end_ms() - before_ms : 0;
    }
    return phases;
  }

 private:
  using Freed = std::pair<double, std::uint64_t>;  // when, and how many bytes

  // When the last operation that is over has ended.
  [[nodiscard]] double end_ms() const { return end_ms_.empty() ? 0 : end_ms_.back(); }

  // When the present operation's storage was asked for, so many operations earlier.
  [[nodiscard]] double asked_ms(std::size_t earlier) const {
    const std::size_t present = begin_ms_.size();
    if (earlier == 0) {
      return end_ms();
    }
    return earlier > present ? 0 : begin_ms_[present - earlier];
  }

  // Takes the bytes that have been free the longest, and returns when the last one of them was free. What is over the
  // bound is there when the operation before has ended.
  double take(std::uint64_t bytes) {
    double ms = 0;
    while (bytes > 0 && !free_.empty()) {
      const auto [freed_ms, freed_bytes] = free_.top();
      free_.pop();
      const std::uint64_t taken = std::min(bytes, freed_bytes);
      bytes -= taken;
      ms = freed_ms;
      if (taken < freed_bytes) {
        free_.push({freed_ms, freed_bytes - taken});
      }
    }
    over_bytes_ += bytes;
    return bytes > 0 ? std::max(ms, end_ms()) : ms;
  }

  // Bytes are free from this time on; nobody gets those that were over the bound.
  void give(double ms, std::uint64_t bytes) {
    const std::uint64_t over = std::min(bytes, over_bytes_);
    over_bytes_ -= over;
    if (bytes > over) {
      free_.push({ms, bytes - over});
    }
  }

  const std::span<const std::size_t> asked_earlier_;
  const EachPhase<double> operation_ms_;
  Link link_;
  std::priority_queue<Freed, std::vector<Freed>, std::greater<>> free_;
  std::vector<double> begin_ms_;  // of each operation
  std::vector<double> end_ms_;
  std::uint64_t over_bytes_ = 0;  // that operations have, and the bound has not
};

}  // namespace

ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t limit) {
  Replay replay(uses, limit, nullptr);
  replay.pass_period();
  return replay.pass_period();
}

std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase) {
  std::uint64_t largest = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    bytes = (begins_operation(uses, i) ? 0 : bytes) + (uses[i].phase == phase ? uses[i].bytes : 0);
    largest = std::max(largest, bytes);
  }
  return largest;
}

ManagedPace::ManagedPace(std::span<const ManagedUse> uses, const ManagedRoom& room)
    : device_bytes_(room.device_bytes), asked_earlier_(asked_earlier(uses, room.ahead_bytes)) {
  for (std::size_t i = 0; i < uses.size(); ++i) {
    operations_[static_cast<std::size_t>(uses[i].phase)] += begins_operation(uses, i) ? 1 : 0;
  }
  Replay replay(uses, room.stay_bytes, &events_);
  for (int i = 0; i < kPeriodsBefore + kPeriods; ++i) {
    counted_from_ = i == kPeriodsBefore ? events_.size() : counted_from_;
    traffic_ = replay.pass_period();
  }
}

EachPhase<double> ManagedPace::phases_ms(const EachPhase<double>& compute_ms, const LinkRates& rates) const {
  EachPhase<double> operation_ms{};
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    operation_ms[phase] = compute_ms[phase] / static_cast<double>(std::max<std::size_t>(1, operations_[phase]));
  }
  EachPhase<double> phases = Clocks(device_bytes_, asked_earlier_, operation_ms, rates).run(events_, counted_from_);
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    phases[phase] = operations_[phase] > 0 ? phases[phase] / kPeriods : compute_ms[phase];
  }
  return phases;
}

}  // namespace ebb
