#include "policy/managed_pace.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>

namespace ebb {
namespace {

using Event = ManagedPeriod::Event;

// Periods before those that count: one to fill the device, and one in which lanes fall behind.
constexpr int kPeriodsBefore = 2;

// Periods that count. A lane that falls behind, and copies that go round, make them differ from one another.
constexpr int kPeriods = 4;

// For each use, how many operations earlier its storage is asked for: at the first operation from whose end on the
// storages that are used until then, each counted once, are within `ahead_bytes`. 0: they never are.
std::vector<std::size_t> asked_earlier(std::span<const ManagedUse> uses, std::uint64_t ahead_bytes) {
  const std::size_t n = uses.size();
  std::vector<std::size_t> begun;  // the operations that have begun at each use, over two periods
  for (std::size_t i = 0; i < 2 * n; ++i) {
    const bool begins = i % n == 0 || uses[i % n].operation != uses[i % n - 1].operation;
    begun.push_back((begun.empty() ? 0 : begun.back()) + (begins ? 1 : 0));
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

// The device's clock and the lanes', and when which bytes of the bound are free.
class Clocks {
 public:
  // `compute_ms`: of one operation.
  Clocks(std::uint64_t device_bytes, std::span<const std::size_t> asked_earlier, const EachPhase<double>& compute_ms,
         const LinkRates& rates)
      : asked_earlier_(asked_earlier),
        compute_ms_(compute_ms),
        in_(rates.in_bytes_per_ms, rates.ms_per_copy),
        out_(rates.out_bytes_per_ms, rates.ms_per_copy) {
    free_.push({0, device_bytes});
  }

  // Adds how long each phase's operations take.
  void pass(const std::vector<Event>& events, EachPhase<double>& phases_ms) {
    std::size_t i = 0;
    while (i < events.size()) {
      const auto phase = static_cast<std::size_t>(events[i].phase);
      const double before_ms = end_ms();
      double arrived_ms = before_ms;
      std::uint64_t ended_bytes = 0;
      for (++i; i < events.size() && events[i].kind != Event::Kind::kBegin; ++i) {
        switch (events[i].kind) {
          case Event::Kind::kFetch:
            arrived_ms = std::max(arrived_ms, fetch(events[i]));
            break;
          case Event::Kind::kMake:
            static_cast<void>(take(events[i].bytes));
            break;
          case Event::Kind::kLeave:
            give(left_ms(events[i]), events[i].bytes);
            break;
          case Event::Kind::kEnd:
            ended_bytes += events[i].bytes;
            break;
          case Event::Kind::kBegin:
            break;
        }
      }
      begin_ms_.push_back(arrived_ms);
      end_ms_.push_back(arrived_ms + compute_ms_[phase]);
      give(end_ms(), ended_bytes);
      phases_ms[phase] += end_ms() - before_ms;
    }
  }

 private:
  using Freed = std::pair<double, std::uint64_t>;  // when, and how many bytes

  // When the last operation that is over has ended.
  [[nodiscard]] double end_ms() const { return end_ms_.empty() ? 0 : end_ms_.back(); }

  // Returns when the storage has arrived.
  double fetch(const Event& event) {
    return in_.copy(std::max(take(event.bytes), asked_ms(asked_earlier_[event.use])), event.bytes);
  }

  // When the present operation's storage was asked for, so many operations earlier.
  [[nodiscard]] double asked_ms(std::size_t earlier) const {
    const std::size_t present = begin_ms_.size();
    if (earlier == 0) {
      return end_ms();
    }
    return earlier > present ? 0 : begin_ms_[present - earlier];
  }

  // Returns when the storage's bytes are free.
  double left_ms(const Event& event) {
    const double idle_ms = end_ms_[event.last_operation];
    return event.written ? out_.copy(idle_ms, event.bytes) : idle_ms;
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
  const EachPhase<double> compute_ms_;
  Lane in_;
  Lane out_;
  std::priority_queue<Freed, std::vector<Freed>, std::greater<>> free_;
  std::vector<double> begin_ms_;  // of each operation
  std::vector<double> end_ms_;
  std::uint64_t over_bytes_ = 0;  // that operations have, and the bound has not
};

}  // namespace

ManagedPace::ManagedPace(std::span<const ManagedUse> uses, const ManagedRoom& room)
    : device_bytes_(room.device_bytes),
      asked_earlier_(asked_earlier(uses, room.ahead_bytes)),
      periods_(replay_periods(uses, room.stay_bytes, kPeriodsBefore + kPeriods)) {
  for (int i = kPeriodsBefore; i < kPeriodsBefore + kPeriods; ++i) {
    for (const Event& event : periods_[i].events) {
      operations_[static_cast<std::size_t>(event.phase)] += event.kind == Event::Kind::kBegin ? 1 : 0;
    }
  }
}

EachPhase<double> ManagedPace::phases_ms(const EachPhase<double>& compute_ms, const LinkRates& rates) const {
  EachPhase<double> operation_ms{};
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    const std::size_t operations = std::max<std::size_t>(1, operations_[phase]);
    operation_ms[phase] = kPeriods * compute_ms[phase] / static_cast<double>(operations);
  }
  Clocks clocks(device_bytes_, asked_earlier_, operation_ms, rates);
  EachPhase<double> phases{};
  for (int i = 0; i < kPeriodsBefore + kPeriods; ++i) {
    if (i == kPeriodsBefore) {
      phases = {};
    }
    clocks.pass(periods_[i].events, phases);
  }
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    phases[phase] = operations_[phase] > 0 ? phases[phase] / kPeriods : compute_ms[phase];
  }
  return phases;
}

}  // namespace ebb
