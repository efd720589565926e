#include "policy/predict.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "policy/range_minimum.h"
#include "policy/transfer_schedule.h"

namespace ebb {

// A step under way, from its first event to its last.
class Predictor::Run {
  using Index = std::uint32_t;
  using Event = StepEvent;

 public:
  Run(const Predictor& predictor, const std::vector<Decision>& decisions)
      : predictor_(predictor),
        record_(predictor.record_),
        decisions_(decisions),
        state_(record_.storages.size()),
        not_held_(not_held(record_, decisions)),
        schedule_(make_schedule(record_, predictor.events_, decisions, predictor.device_bytes_)),
        least_between_(schedule_.backward.held_bytes),
        link_(predictor.rates_) {}

  Prediction run() {
    for (std::size_t k = 0; k < predictor_.events_.size(); ++k) {
      const Event& event = predictor_.events_[k];
      now_ms_ = std::max(now_ms_, event.ms + delay_ms_);
      finish_copies_out();
      if (is_of_storage(event) && is_not_held(event.index)) {
        continue;
      }
      take(event);
      if (event.what == Event::What::kNeed || backward_has_begun(k)) {
        start_copies_in();
      }
    }
    result_.step_ms = record_.end_ms + delay_ms_;
    for (Index i = 0; i < decisions_.size(); ++i) {
      bytes_of(result_, decisions_[i]) += is_not_held(i) ? 0 : record_.storages[i].bytes;
    }
    return result_;
  }

 private:
  enum class Where : std::uint8_t { kNowhere, kOnDevice, kLeaving, kAway, kArriving, kReleased };

  struct State {
    Where where = Where::kNowhere;
    double done_ms = 0;    // kLeaving, kAway: of the copy out. kArriving: of the copy in
    bool counted = false;  // in held_ or made_again_
  };

  static std::uint64_t& bytes_of(Prediction& result, Decision decision) {
    if (decision == Decision::kKeep) {
      return result.kept_bytes;
    }
    return decision == Decision::kOffload ? result.offloaded_bytes : result.recomputed_bytes;
  }

  [[nodiscard]] bool is_not_held(Index i) const { return !not_held_.empty() && not_held_[i]; }
  static bool is_of_storage(const Event& event) {
    return event.what != Event::What::kLevel && event.what != Event::What::kBackward;
  }

  void take(const Event& event) {
    switch (event.what) {
      case Event::What::kLevel:
        other_ = record_.other[event.index].bytes;
        watch_peak();
        break;
      case Event::What::kSave:
        save(event.index);
        break;
      case Event::What::kIdle:
        idle(event.index);
        break;
      case Event::What::kBackward:
        shrink_stash(schedule_.stash.in_backward);
        break;
      case Event::What::kNeed:
        ++part_;
        if (makes_several(event.index)) {
          start_copies_in();  // before the run begins
        }
        need(event.index, record_.storages[event.index].other_bytes);
        break;
      case Event::What::kRelease:
        release(event.index);
        break;
    }
  }

  // Whether event `k` is the last of those with which backward begins: the beginning itself, and the level of other
  // memory that backward begins with. Before that event the level is still the forward pass's.
  [[nodiscard]] bool backward_has_begun(std::size_t k) const {
    const std::vector<Event>& events = predictor_.events_;
    const auto belongs = [&](const Event& event) {
      return event.what == Event::What::kBackward ||
             (event.what == Event::What::kLevel && event.ms == record_.backward_ms);
    };
    return belongs(events[k]) && (k + 1 == events.size() || !belongs(events[k + 1]));
  }

  void save(Index i) {
    if (decisions_[i] == Decision::kKeep) {
      state_[i].where = Where::kOnDevice;
    } else if (decisions_[i] == Decision::kOffload) {
      state_[i] = {Where::kLeaving, link_.copy_out(now_ms_, record_.storages[i].bytes)};
      leaving_.push_back(i);
      stash_ += record_.storages[i].bytes;
    }
    shrink_stash(schedule_.stash.after_save[i]);
  }

  void idle(Index i) {
    const Where where = state_[i].where;
    if (!state_[i].counted && (where == Where::kOnDevice || where == Where::kLeaving)) {
      hold(i);
    }
  }

  // Whether the need of storage `i` has a recipe run that makes several storages.
  [[nodiscard]] bool makes_several(Index i) const {
    return record_.storages[i].made_with != StorageRecord::kAlone && is_to_be_made(i);
  }
  [[nodiscard]] bool is_to_be_made(Index i) const {
    return decisions_[i] == Decision::kRecompute && state_[i].where == Where::kNowhere;
  }

  // Brings the bytes of storage `i` back to the device. `other_bytes`: the other memory at this need.
  void need(Index i, std::uint64_t other_bytes) {
    State& state = state_[i];
    switch (state.where) {
      case Where::kOnDevice:
      case Where::kReleased:
        return;
      case Where::kLeaving:  // the source is still there
        state.where = Where::kOnDevice;
        return;
      case Where::kAway:
        copy_in(i);
        [[fallthrough]];
      case Where::kArriving:
        stall_until(state.done_ms);
        state.where = Where::kOnDevice;
        return;
      case Where::kNowhere:
        recompute(i, other_bytes);
        return;
    }
  }

  void recompute(Index i, std::uint64_t other_bytes) {
    const StorageRecord& storage = record_.storages[i];
    for (const Index input : storage.inputs) {
      need(input, other_bytes);
    }
    std::uint64_t own_bytes = storage.recompute_bytes;
    for_each_made_with(record_, i, [&](Index made) {
      if (is_to_be_made(made)) {
        hold(made);
        state_[made].where = Where::kOnDevice;
      } else {  // made, too, and let go of
        own_bytes += record_.storages[made].bytes;
      }
    });
    result_.peak_bytes = std::max(result_.peak_bytes, other_bytes + held_ + made_again_ + own_bytes);
    delay(storage.recompute_ms);
    result_.recompute_ms += storage.recompute_ms;
  }

  void release(Index i) {
    let_go(i);
    state_[i].where = Where::kReleased;
  }

  void start_copies_in() {
    const std::vector<PrefetchSchedule::CopyIn>& copies = schedule_.backward.copies_in;
    for (; next_in_ < copies.size(); ++next_in_) {
      const auto [i, last_part] = copies[next_in_];
      State& state = state_[i];
      if (state.where != Where::kLeaving && state.where != Where::kAway) {
        continue;
      }
      const std::uint64_t more = state.where == Where::kAway ? record_.storages[i].bytes : 0;
      if (held_ + more > least_between_(std::min<std::size_t>(part_, last_part), last_part)) {
        return;
      }
      if (state.where == Where::kAway) {
        copy_in(i);
      } else {  // the source is still in the stash and stays for its use
        state.where = Where::kOnDevice;
      }
    }
  }

  void copy_in(Index i) {
    hold(i);
    state_[i].where = Where::kArriving;
    state_[i].done_ms = link_.copy_in(std::max(now_ms_, state_[i].done_ms), record_.storages[i].bytes);
  }

  void finish_copies_out() {
    while (!leaving_.empty() && state_[leaving_.front()].done_ms <= now_ms_) {
      finish_oldest();
    }
  }

  void finish_oldest() {
    State& oldest = state_[leaving_.front()];
    stash_ -= record_.storages[leaving_.front()].bytes;
    if (oldest.where == Where::kLeaving) {
      let_go(leaving_.front());
      oldest.where = Where::kAway;
    }
    leaving_.pop_front();
  }

  void shrink_stash(std::uint64_t bytes) {
    while (stash_ > bytes) {
      stall_until(state_[leaving_.front()].done_ms);
      finish_oldest();
    }
  }

  void hold(Index i) {
    state_[i].counted = true;
    held_of(i) += record_.storages[i].bytes;
    watch_peak();
  }

  std::uint64_t& held_of(Index i) { return decisions_[i] == Decision::kRecompute ? made_again_ : held_; }

  void watch_peak() { result_.peak_bytes = std::max(result_.peak_bytes, other_ + held_ + made_again_); }

  void let_go(Index i) {
    if (std::exchange(state_[i].counted, false)) {
      held_of(i) -= record_.storages[i].bytes;
    }
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
  const std::vector<bool> not_held_;  // by storage; empty for none
  const TransferSchedule schedule_;
  const RangeMinimum least_between_;  // of PrefetchSchedule::held_bytes
  std::size_t part_ = 0;              // of backward
  std::size_t next_in_ = 0;           // of the copies in
  std::deque<Index> leaving_;         // oldest first
  Link link_;
  double now_ms_ = 0;
  double delay_ms_ = 0;  // how far compute is behind the record
  std::uint64_t other_ = 0;
  std::uint64_t held_ = 0;
  std::uint64_t made_again_ = 0;  // held too: made by recipes, for which PrefetchSchedule::held_bytes leaves room
  std::uint64_t stash_ = 0;       // the bytes of `leaving_`, including sources that the forward pass still uses
  Prediction result_;
};

Predictor::Predictor(const StepRecord& record, std::uint64_t device_bytes, const LinkRates& rates)
    : record_(record), device_bytes_(device_bytes), rates_(rates), events_(step_events(record)) {}

Prediction Predictor::predict(const std::vector<Decision>& decisions) const { return Run(*this, decisions).run(); }

}  // namespace ebb
