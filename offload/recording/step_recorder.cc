#include "offload/recording/step_recorder.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "offload/accounts/gauge.h"

namespace ebb {
namespace {

std::uint64_t less(std::uint64_t bytes, std::uint64_t by) { return bytes > by ? bytes - by : 0; }

}  // namespace

StepRecorder::StepRecorder(std::shared_ptr<Tier> tier, std::shared_ptr<DeviceAccount> account, DeviceMeter meter,
                           std::uint64_t step)
    : tier_(std::move(tier)),
      account_(std::move(account)),
      meter_(std::move(meter)),
      step_(step),
      evictions_before_(account_->evictions) {}

bool StepRecorder::is_on(c10::Stream stream) const {
  const MutexLock lock(mutex_);
  return !over_ && stream_ == stream;
}

std::uint32_t StepRecorder::saved(const c10::Storage& storage, Recompute recompute, std::vector<std::uint32_t> inputs,
                                  std::weak_ptr<const void> held, std::uint64_t run, bool is_for_recipes) {
  StorageRecord record{
      .bytes = storage.nbytes(), .recompute = recompute, .is_for_recipes = is_for_recipes, .inputs = std::move(inputs)};
  std::uint32_t index = 0;
  {
    const MutexLock lock(mutex_);
    if (over_) {
      return 0;
    }
    index = static_cast<std::uint32_t>(storages_.size());
    storages_.push_back({storage.getWeakStorageImpl(), std::move(held), std::move(record), run});
    in_use_.push_back(index);
  }
  mark(What::kSaved, index);
  return index;
}

void StepRecorder::kept(std::uint32_t index) noexcept {
  const MutexLock lock(mutex_);
  if (!over_) {
    storages_[index].idle = true;
  }
}

void StepRecorder::needed(std::uint32_t index) noexcept {
  {
    const MutexLock lock(mutex_);
    if (over_ || std::exchange(storages_[index].needed, true)) {
      return;
    }
  }
  mark(What::kNeeded, index);
}

void StepRecorder::released(std::uint32_t index) noexcept {
  {
    const MutexLock lock(mutex_);
    if (over_ || std::exchange(storages_[index].released, true)) {
      return;
    }
    constexpr std::size_t kMany = 1000;
    const bool early = !in_backward_ && !met_eviction();  // after an eviction, finish() is to tell of it
    if (early && ++released_early_ >= kMany && 4 * released_early_ > 3 * storages_.size()) {
      give_up_locked();
      return;
    }
  }
  mark(What::kReleased, index);
}

void StepRecorder::backward_begins() noexcept {
  {
    const MutexLock lock(mutex_);
    if (over_ || std::exchange(in_backward_, true)) {
      return;
    }
  }
  mark(What::kBackward, 0);
}

StepRecorder::Outcome StepRecorder::finish() {
  {
    const MutexLock lock(mutex_);
    if (over_) {
      return {};
    }
    if (std::ranges::none_of(storages_, &Storage::needed)) {  // the backward was another graph's
      in_backward_ = false;
      if (!marks_.empty() && marks_.back().what == What::kBackward) {  // such backwards may come by the thousand
        peak_before_ = std::max(peak_before_, marks_.back().peak_bytes);
        marks_.pop_back();
      }
      return {};
    }
  }
  mark(What::kEnd, 0);
  Ticket end;
  {
    const MutexLock lock(mutex_);
    if (over_) {  // given up meanwhile
      return {};
    }
    over_ = true;
    if (!in_backward_ || disturbed()) {
      return {.found_device_full = met_eviction()};
    }
    end = marks_.back().time;
  }
  end->synchronize();  // without the lock: a save that ends on another thread takes it
  const MutexLock lock(mutex_);
  if (marks_.empty()) {  // given up meanwhile
    return {};
  }
  const double ms = tier_->ms_between(marks_.front().time, marks_.back().time);
  Outcome outcome{.record = record(), .cost = {ms, most_in_use_bytes_}};
  marks_.clear();
  return outcome;
}

void StepRecorder::give_up() noexcept {
  const MutexLock lock(mutex_);
  give_up_locked();
}

// See Note [Steps that never end].
void StepRecorder::give_up_locked() noexcept {
  over_ = true;
  marks_ = {};
  storages_ = {};
  in_use_ = {};
}

// Adds a mark at the stream's present point.
void StepRecorder::mark(What what, std::uint32_t index) noexcept {
  if (disturbed()) {
    return;
  }
  try {
    const c10::Stream stream = tier_->current_stream();
    const DeviceUse use = meter_ ? meter_() : DeviceUse{};
    const MutexLock lock(mutex_);
    add_mark(what, index, stream, use);
  } catch (...) {  // no host memory for the mark, or no event
    disturb();
  }
}

void StepRecorder::add_mark(What what, std::uint32_t index, c10::Stream stream, const DeviceUse& use) {
  if (over_) {
    return;
  }
  if (stream_.value_or(stream) != stream) {
    disturb();
    return;
  }
  stream_ = stream;
  const std::uint64_t held = account_->storages_bytes();
  const Mark mark{what, index, tier_->time_point(stream), less(use.now_bytes, held),
                  std::max(std::exchange(peak_before_, 0), less(use.peak_bytes, std::min(held, held_bytes_)))};
  held_bytes_ = held;
  if (!meter_) {
    most_in_use_bytes_ = std::max(most_in_use_bytes_, held);
  } else if (!marks_.empty()) {  // the first mark's peak is from before the step
    most_in_use_bytes_ = std::max(most_in_use_bytes_, use.peak_bytes);
  }
  marks_.push_back(mark);
  const auto look_at = [&](std::uint32_t i) EBB_REQUIRES(mutex_) {
    Storage& storage = storages_[i];
    const std::size_t by_ebb = storage.held.expired() ? 0 : 1;
    // An idle object of Python's counts as the program's: to tell, a strong reference would have to be made, which may
    // take the interpreter's lock.
    if (!storage.idle && storage.source.use_count() <= by_ebb) {
      storage.idle = true;
      marks_.push_back({What::kIdle, i, mark.time, mark.other_bytes, mark.other_bytes});
    }
  };
  if (what == What::kNeeded) {
    look_at(index);
  }
  // Each mark looks at a few storages only: a program may hold thousands of the tensors that it saves, and looking at
  // all of them at every mark would cost too much.
  constexpr std::size_t kMost = 64;
  const std::size_t first = next_in_use_ < in_use_.size() ? next_in_use_ : 0;
  const auto begin = in_use_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = begin + static_cast<std::ptrdiff_t>(std::min(kMost, in_use_.size() - first));
  // What is still in use at its need counts as in use for good: keeping it costs nothing.
  const auto still_in_use = std::remove_if(begin, end, [&](std::uint32_t i) EBB_REQUIRES(mutex_) {
    if (!storages_[i].needed) {
      look_at(i);
    }
    return storages_[i].idle || storages_[i].needed;
  });
  next_in_use_ = end == in_use_.end() ? 0 : static_cast<std::size_t>(still_in_use - in_use_.begin());
  in_use_.erase(still_in_use, end);
}

// Turns points in time into a clock that stands still in clock pauses.
class StepRecorder::Clock {
 public:
  struct Pause {
    double begin_ms = 0;
    double inside_ms = 0;            // of the pauses inside of it
    std::uint64_t bytes_before = 0;  // other memory
    std::uint64_t peak_bytes = 0;    // the most other memory, without recipes inside of it
    double own_ms = 0;               // its length, less the pauses inside of it; once it has ended
  };

  explicit Clock(const StepRecorder& recorder) : tier_(*recorder.tier_), start_(recorder.marks_.front().time) {}

  double at(const Mark& mark) {
    const double now = tier_.ms_between(start_, mark.time);
    if (!open_.empty()) {
      open_.back().peak_bytes = std::max(open_.back().peak_bytes, mark.peak_bytes);
    }
    if (mark.what == What::kPause) {
      open_.push_back({.begin_ms = now, .bytes_before = mark.other_bytes});
    } else if (mark.what == What::kPauseEnd && !open_.empty()) {
      ended_ = open_.back();
      open_.pop_back();
      const double span = now - ended_.begin_ms;
      ended_.own_ms = span - ended_.inside_ms;
      (open_.empty() ? pauses_ms_ : open_.back().inside_ms) += span;
      if (!open_.empty() && mark.index == ClockPause::kManaged) {  // amid the operations that the outer pause runs
        open_.back().peak_bytes = std::max(open_.back().peak_bytes, ended_.peak_bytes);
      }
    }
    last_ = std::max(last_, open_.empty() ? now - pauses_ms_ : last_);
    return last_;
  }

  [[nodiscard]] bool in_pause() const { return !open_.empty(); }

  // The last pause that has ended.
  [[nodiscard]] const Pause& ended() const { return ended_; }

 private:
  const Tier& tier_;
  const Ticket start_;
  std::vector<Pause> open_;
  Pause ended_;
  double pauses_ms_ = 0;
  double last_ = 0;
};

StepRecord StepRecorder::record() const {
  StepRecord result;
  result.is_preliminary = awaits_recipes_;
  for (const Storage& storage : storages_) {
    result.storages.push_back(storage.record);
  }
  Clock clock(*this);
  std::map<std::uint64_t, std::uint64_t> made_in;  // bytes, by run
  for (const Storage& storage : storages_) {
    made_in[storage.run] += storage.record.recompute == Recompute::kNo ? 0 : storage.record.bytes;
  }
  const auto made_bytes = [&](std::uint32_t index) EBB_REQUIRES(mutex_) {
    return storages_[index].run == 0 ? storages_[index].record.bytes : made_in[storages_[index].run];
  };
  double ms = 0;
  double ms_before = 0;  // the time of the mark before
  for (const Mark& mark : marks_) {
    const bool after_pause = clock.in_pause();
    const double now = clock.at(mark);
    if (mark.what != What::kIdle) {
      ms_before = std::exchange(ms, now);
    }
    if (!after_pause && !result.other.empty()) {
      result.other.back().bytes = std::max(result.other.back().bytes, mark.peak_bytes);
    }
    if (!clock.in_pause()) {
      result.other.push_back({ms, mark.other_bytes});
    }
    switch (mark.what) {
      case What::kSaved:
        result.storages[mark.index].saved_ms = ms;
        break;
      case What::kIdle:
        result.storages[mark.index].idle_ms = meter_ ? ms_before : result.storages[mark.index].saved_ms;
        break;
      case What::kNeeded:
        result.storages[mark.index].needed_ms = ms;
        result.storages[mark.index].other_bytes = mark.other_bytes;
        break;
      case What::kReleased:
        result.storages[mark.index].released_ms = ms;
        break;
      case What::kBackward:
        result.backward_ms = ms;
        break;
      case What::kEnd:
        result.end_ms = ms;
        break;
      case What::kPause:
        break;
      case What::kPauseEnd:
        if (is_recipe(mark.index)) {
          StorageRecord& storage = result.storages[mark.index];
          const Clock::Pause& recipe = clock.ended();
          storage.recompute_ms = recipe.own_ms;
          storage.recompute_bytes = less(recipe.peak_bytes, recipe.bytes_before + made_bytes(mark.index));
        }
        break;
    }
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    StorageRecord& storage = result.storages[i];
    storage.needed_ms = storages_[i].needed ? storage.needed_ms : result.end_ms;
    storage.is_for_recipes = storage.is_for_recipes && !storages_[i].needed;
    storage.bytes = storages_[i].idle ? storage.bytes : 0;
    storage.released_ms = storages_[i].released ? storage.released_ms : result.end_ms;
  }
  put_together(result);
  return result;
}

// Joins what one run makes. The storage that was needed first has the run's time and memory, and the others, for which
// nothing was run, get both from there.
void StepRecorder::put_together(StepRecord& record) const {
  std::map<std::uint64_t, std::uint32_t> last;  // by run
  for (std::uint32_t i = 0; i < storages_.size(); ++i) {
    StorageRecord& storage = record.storages[i];
    if (storages_[i].run == 0 || storage.recompute == Recompute::kNo) {
      continue;
    }
    const auto [before, is_first] = last.try_emplace(storages_[i].run, i);
    if (!is_first) {
      StorageRecord& other = record.storages[before->second];
      storage.made_with = other.made_with == StorageRecord::kAlone ? before->second : other.made_with;
      other.made_with = i;
      before->second = i;
    }
  }
  for (const auto& [run, i] : last) {
    double ms = 0;
    std::uint64_t bytes = 0;
    for_each_made_with(record, i, [&](std::uint32_t each) {
      ms = std::max(ms, record.storages[each].recompute_ms);
      bytes = std::max(bytes, record.storages[each].recompute_bytes);
    });
    for_each_made_with(record, i, [&](std::uint32_t each) {
      record.storages[each].recompute_ms = ms;
      record.storages[each].recompute_bytes = bytes;
    });
  }
}

}  // namespace ebb
