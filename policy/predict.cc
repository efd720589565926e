#include "policy/predict.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

namespace ebb {
namespace {

using Index = std::uint32_t;

struct Event {
  enum class What : std::uint8_t { kLevel, kBackward, kSave, kNeed, kRelease };  // at the same time, in this order

  double ms = 0;
  What what = What::kLevel;
  Index index = 0;

  friend bool operator<(const Event& a, const Event& b) {
    if (a.ms != b.ms) {
      return a.ms < b.ms;
    }
    return a.what != b.what ? a.what < b.what : a.index < b.index;
  }
};

std::vector<Event> events_of(const StepRecord& record) {
  std::vector<Event> events;
  events.reserve(3 * record.storages.size() + record.other.size() + 1);
  for (Index i = 0; i < record.storages.size(); ++i) {
    const StorageRecord& storage = record.storages[i];
    events.push_back({storage.saved_ms, Event::What::kSave, i});
    events.push_back({storage.needed_ms, Event::What::kNeed, i});
    events.push_back({std::max(storage.released_ms, storage.needed_ms), Event::What::kRelease, i});
  }
  for (Index i = 0; i < record.other.size(); ++i) {
    events.push_back({record.other[i].ms, Event::What::kLevel, i});
  }
  events.push_back({record.backward_ms, Event::What::kBackward, 0});
  std::sort(events.begin(), events.end());
  return events;
}

// One copy at a time.
class Lane {
 public:
  // Returns when it is done.
  double copy(double not_before, double takes) { return free_ms_ = std::max(free_ms_, not_before) + takes; }

 private:
  double free_ms_ = 0;
};

// The largest level between two moving ends, neither of which moves back.
class LevelsAhead {
 public:
  explicit LevelsAhead(const std::vector<StepRecord::Level>& levels) : levels_(levels) {}

  // Over the levels from index `first` to the last that begins by `ms`; at least that of `first`.
  std::uint64_t most(std::size_t first, double ms) {
    for (; end_ < levels_.size() && (end_ <= first || levels_[end_].ms <= ms); ++end_) {
      while (!falling_.empty() && levels_[falling_.back()].bytes <= levels_[end_].bytes) {
        falling_.pop_back();
      }
      falling_.push_back(end_);
    }
    while (!falling_.empty() && falling_.front() < first) {
      falling_.pop_front();
    }
    return falling_.empty() ? 0 : levels_[falling_.front()].bytes;
  }

 private:
  const std::vector<StepRecord::Level>& levels_;
  std::size_t end_ = 0;
  std::deque<std::size_t> falling_;
};

}  // namespace

struct Predictor::Order {
  std::vector<Event> events;
  std::vector<Index> of_need;
};

// A step under way.
class Predictor::Run {
 public:
  Run(const Predictor& predictor, const std::vector<Decision>& decisions)
      : predictor_(predictor),
        record_(predictor.record_),
        decisions_(decisions),
        state_(record_.storages.size()),
        ahead_(record_.other) {
    plan_copies_in();
  }

  Prediction run() {
    for (const Event& event : predictor_.order_->events) {
      now_ms_ = std::max(now_ms_, event.ms + delay_ms_);
      finish_copies_out();
      take(event);
      start_copies_in();
    }
    result_.step_ms = record_.end_ms + delay_ms_;
    for (Index i = 0; i < decisions_.size(); ++i) {
      bytes_of(result_, decisions_[i]) += record_.storages[i].bytes;
    }
    return result_;
  }

 private:
  enum class Where : std::uint8_t { kNowhere, kOnDevice, kLeaving, kAway, kArriving, kReleased };

  struct State {
    Where where = Where::kNowhere;
    double done_ms = 0;  // kLeaving, kAway: of the copy out. kArriving: of the copy in
  };

  struct CopyIn {
    Index storage = 0;
    double needed_ms = 0;  // by itself, or by what is recomputed from it
  };

  static std::uint64_t& bytes_of(Prediction& result, Decision decision) {
    switch (decision) {
      case Decision::kOffload:
        return result.offloaded_bytes;
      case Decision::kRecompute:
        return result.recomputed_bytes;
      case Decision::kKeep:
        break;
    }
    return result.kept_bytes;
  }

  void take(const Event& event) {
    switch (event.what) {
      case Event::What::kLevel:
        level_ = event.index;
        other_ = record_.other[event.index].bytes;
        fit(0);
        break;
      case Event::What::kSave:
        save(event.index);
        break;
      case Event::What::kBackward:
        in_backward_ = true;
        break;
      case Event::What::kNeed:
        in_backward_ = true;
        need(event.index);
        break;
      case Event::What::kRelease:
        release(event.index);
        break;
    }
  }

  void save(Index i) {
    if (decisions_[i] == Decision::kRecompute) {
      return;
    }
    const std::uint64_t bytes = record_.storages[i].bytes;
    fit(bytes);
    hold(bytes);
    state_[i].where = Where::kOnDevice;
    if (decisions_[i] == Decision::kOffload) {
      state_[i] = {Where::kLeaving, out_.copy(now_ms_, takes(i, predictor_.rates_.out_bytes_per_ms))};
      leaving_.push_back(i);
    }
  }

  // Everything that backward does with a storage happens with its bytes on the device.
  void need(Index i) {
    State& state = state_[i];
    switch (state.where) {
      case Where::kOnDevice:
        return;
      case Where::kLeaving:  // the source is still there
        state.where = Where::kOnDevice;
        return;
      case Where::kAway:
        fit(record_.storages[i].bytes);
        copy_in(i);
        [[fallthrough]];
      case Where::kArriving:
        stall_until(state.done_ms);
        state.where = Where::kOnDevice;
        return;
      case Where::kNowhere:
        recompute(i);
        return;
      case Where::kReleased:
        return;
    }
  }

  void recompute(Index i) {
    const StorageRecord& storage = record_.storages[i];
    for (const Index input : storage.inputs) {
      need(input);
    }
    fit(storage.bytes);
    hold(storage.bytes);
    delay(storage.recompute_ms);
    result_.recompute_ms += storage.recompute_ms;
    state_[i].where = Where::kOnDevice;
  }

  void release(Index i) {
    State& state = state_[i];
    if (state.where == Where::kOnDevice || state.where == Where::kLeaving || state.where == Where::kArriving) {
      held_ -= record_.storages[i].bytes;
    }
    state.where = Where::kReleased;
  }

  // Copies in come in the order of need: that of the storages, and each recipe's inputs before its result.
  void plan_copies_in() {
    std::vector<bool> listed(state_.size());
    for (const Index i : predictor_.order_->of_need) {
      list(i, record_.storages[i].needed_ms, listed);
    }
  }

  void list(Index i, double needed_ms, std::vector<bool>& listed) {
    if (listed[i]) {
      return;
    }
    listed[i] = true;
    if (decisions_[i] == Decision::kRecompute) {
      for (const Index input : record_.storages[i].inputs) {
        list(input, needed_ms, listed);
      }
    } else if (decisions_[i] == Decision::kOffload) {
      to_copy_in_.push_back({i, needed_ms});
    }
  }

  void start_copies_in() {
    if (!in_backward_) {
      return;
    }
    for (; next_in_ < to_copy_in_.size(); ++next_in_) {
      const auto [i, needed_ms] = to_copy_in_[next_in_];
      State& state = state_[i];
      if (state.where != Where::kLeaving && state.where != Where::kAway) {
        continue;
      }
      const std::uint64_t more = state.where == Where::kAway ? record_.storages[i].bytes : 0;
      if (ahead_.most(level_, needed_ms) + held_ + more > predictor_.limits_.device_bytes) {
        return;
      }
      if (state.where == Where::kAway) {
        copy_in(i);
      } else {  // the source is kept for its use
        state.where = Where::kOnDevice;
      }
    }
  }

  void copy_in(Index i) {
    hold(record_.storages[i].bytes);
    state_[i] = {Where::kArriving,
                 in_.copy(std::max(now_ms_, state_[i].done_ms), takes(i, predictor_.rates_.in_bytes_per_ms))};
  }

  [[nodiscard]] double takes(Index i, double bytes_per_ms) const {
    return static_cast<double>(record_.storages[i].bytes) / bytes_per_ms + predictor_.rates_.ms_per_copy;
  }

  void finish_copies_out() {
    while (!leaving_.empty() && state_[leaving_.front()].done_ms <= now_ms_) {
      finish_oldest();
    }
  }

  void finish_oldest() {
    State& oldest = state_[leaving_.front()];
    if (oldest.where == Where::kLeaving) {
      held_ -= record_.storages[leaving_.front()].bytes;
      oldest.where = Where::kAway;
    }
    leaving_.pop_front();
  }

  // Compute waits for copies out until there is room for so much more.
  void fit(std::uint64_t bytes) {
    while (!leaving_.empty() && other_ + held_ + bytes > predictor_.limits_.device_bytes) {
      const State& oldest = state_[leaving_.front()];
      if (oldest.where == Where::kLeaving) {
        stall_until(oldest.done_ms);
      }
      finish_oldest();
    }
    result_.peak_bytes = std::max(result_.peak_bytes, other_ + held_ + bytes);
  }

  void hold(std::uint64_t bytes) {
    held_ += bytes;
    result_.peak_bytes = std::max(result_.peak_bytes, other_ + held_);
  }

  void stall_until(double ms) {
    if (ms > now_ms_) {
      result_.stalled_ms += ms - now_ms_;
      delay(ms - now_ms_);
    }
  }

  void delay(double ms) {
    delay_ms_ += ms;
    now_ms_ += ms;
  }

  const Predictor& predictor_;
  const StepRecord& record_;
  const std::vector<Decision>& decisions_;

  std::vector<State> state_;
  std::vector<CopyIn> to_copy_in_;
  std::size_t next_in_ = 0;
  std::deque<Index> leaving_;  // oldest first
  Lane out_;
  Lane in_;
  LevelsAhead ahead_;
  std::size_t level_ = 0;  // the present one
  double now_ms_ = 0;
  double delay_ms_ = 0;  // by which compute is behind the record
  std::uint64_t other_ = 0;
  std::uint64_t held_ = 0;
  bool in_backward_ = false;
  Prediction result_;
};

Predictor::Predictor(const StepRecord& record, const Limits& limits, const LinkRates& rates)
    : record_(record), limits_(limits), rates_(rates), order_(std::make_unique<Order>()) {
  order_->events = events_of(record);
  for (const Event& event : order_->events) {
    if (event.what == Event::What::kNeed) {
      order_->of_need.push_back(event.index);
    }
  }
}

Predictor::~Predictor() = default;

Prediction Predictor::predict(const std::vector<Decision>& decisions) const { return Run(*this, decisions).run(); }

}  // namespace ebb
