#include "policy/step_record.h"

#include <algorithm>
#include <utility>

namespace ebb {

StepRecord changed(StepRecord record, const std::function<double(double)>& later, std::int64_t more_bytes) {
  const auto change = [&](std::uint64_t& bytes) {
    bytes = more_bytes < 0 ? bytes - std::min(bytes, static_cast<std::uint64_t>(-more_bytes))
                           : bytes + static_cast<std::uint64_t>(more_bytes);
  };
  for (StorageRecord& storage : record.storages) {
    for (double* const ms : {&storage.saved_ms, &storage.idle_ms, &storage.needed_ms, &storage.released_ms}) {
      *ms = later(*ms);
    }
    change(storage.other_bytes);
  }
  for (StepRecord::Level& level : record.other) {
    level.ms = later(level.ms);
    change(level.bytes);
  }
  record.backward_ms = later(record.backward_ms);
  record.end_ms = later(record.end_ms);
  return record;
}

StepRecord slowed(StepRecord record, double factor, std::int64_t more_bytes) {
  for (StorageRecord& storage : record.storages) {
    storage.recompute_ms *= factor;
  }
  return changed(
      std::move(record), [factor](double ms) { return ms * factor; }, more_bytes);
}

std::vector<bool> not_held(const StepRecord& record, const std::vector<Decision>& decisions) {
  std::vector<bool> none;
  if (std::ranges::none_of(record.storages, &StorageRecord::is_for_recipes)) {
    return none;
  }
  for (const StorageRecord& storage : record.storages) {
    none.push_back(storage.is_for_recipes);
  }
  for (std::size_t i = decisions.size(); i-- > 0;) {  // inputs come before
    const bool is_run = decisions[i] == Decision::kRecompute && !none[i];
    for (const std::uint32_t input : record.storages[i].inputs) {
      none[input] = none[input] && !is_run;
    }
  }
  return none;
}

std::vector<StepEvent> step_events(const StepRecord& record) {
  std::vector<StepEvent> events;
  events.reserve(4 * record.storages.size() + record.other.size() + 1);
  for (std::uint32_t i = 0; i < record.storages.size(); ++i) {
    const StorageRecord& storage = record.storages[i];
    events.push_back({storage.saved_ms, StepEvent::What::kSave, i});
    events.push_back({std::max(storage.saved_ms, storage.idle_ms), StepEvent::What::kIdle, i});
    double last_ms = std::max(storage.saved_ms, storage.idle_ms);
    if (!storage.is_for_recipes) {
      events.push_back({storage.needed_ms, StepEvent::What::kNeed, i});
      last_ms = storage.needed_ms;
    }
    events.push_back({std::max(storage.released_ms, last_ms), StepEvent::What::kRelease, i});
  }
  for (std::uint32_t i = 0; i < record.other.size(); ++i) {
    events.push_back({record.other[i].ms, StepEvent::What::kLevel, i});
  }
  events.push_back({record.backward_ms, StepEvent::What::kBackward, 0});
  std::sort(events.begin(), events.end());
  return events;
}

}  // namespace ebb
