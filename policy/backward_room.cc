#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "policy/room.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();

// Other memory is what the record says, and what has been recomputed and not yet released. (What has been recomputed
// before a copy starts counts twice then: here, and as held.)
class BackwardWalk {
 public:
  BackwardWalk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record), decisions_(decisions), device_bytes_(device_bytes), listed_(decisions.size()) {}

  BackwardRoom run(const std::vector<StepEvent>& events) {
    room_.needed.reserve(decisions_.size());
    room_.held_bytes.reserve(decisions_.size() + 1);
    for (const StepEvent& event : events) {
      take(event);
    }
    if (room_.held_bytes.empty()) {
      begin_part();
    }
    for (const std::uint32_t i : room_.needed) {
      list_copies(i, record_.storages[i].needed_ms);
    }
    return std::move(room_);
  }

 private:
  void take(const StepEvent& event) {
    switch (event.what) {
      case StepEvent::What::kBackward:
        if (room_.held_bytes.empty()) {
          begin_part();
          level_is_of_forward_ = true;
        }
        return;
      case StepEvent::What::kLevel:
        other_ = record_.other[event.index].bytes;
        if (event.ms == record_.backward_ms && std::exchange(level_is_of_forward_, false)) {
          room_.held_bytes.back() = kNoBound;
        }
        lower();
        return;
      case StepEvent::What::kNeed:
        level_is_of_forward_ = false;
        if (room_.held_bytes.empty()) {  // before backward has begun
          begin_part();
        }
        if (decisions_[event.index] == Decision::kRecompute) {
          recomputed_ += record_.storages[event.index].bytes;
        }
        room_.needed.push_back(event.index);
        need_ms_.push_back(event.ms);
        begin_part();
        return;
      case StepEvent::What::kRelease:
        if (decisions_[event.index] == Decision::kRecompute) {
          recomputed_ -= record_.storages[event.index].bytes;
        }
        return;
      case StepEvent::What::kSave:
      case StepEvent::What::kIdle:
        return;
    }
  }

  void begin_part() {
    room_.held_bytes.push_back(kNoBound);
    lower();
  }

  void lower() {
    if (device_bytes_ != kNoBound && !room_.held_bytes.empty()) {
      const std::uint64_t taken = other_ + recomputed_;
      room_.held_bytes.back() = std::min(room_.held_bytes.back(), device_bytes_ - std::min(device_bytes_, taken));
    }
  }

  // A recipe's inputs before its result.
  void list_copies(std::uint32_t i, double needed_ms) {
    if (listed_[i]) {
      return;
    }
    listed_[i] = true;
    if (decisions_[i] == Decision::kRecompute) {
      for (const std::uint32_t input : record_.storages[i].inputs) {
        list_copies(input, needed_ms);
      }
    } else if (decisions_[i] == Decision::kOffload) {
      // It is on the device until it is released, whatever is needed before that.
      const double until_ms = std::max(needed_ms, record_.storages[i].released_ms);
      const auto after = std::ranges::upper_bound(need_ms_, until_ms);
      room_.copies_in.push_back({i, static_cast<std::uint32_t>(after - need_ms_.begin())});
    }
  }

  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  const std::uint64_t device_bytes_;
  std::uint64_t other_ = 0;
  std::uint64_t recomputed_ = 0;
  bool level_is_of_forward_ = false;  // in the first part, unless a level begins where that does
  std::vector<double> need_ms_;
  std::vector<bool> listed_;
  BackwardRoom room_;
};

}  // namespace

BackwardRoom backward_room(const StepRecord& record, const std::vector<StepEvent>& events,
                           const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return BackwardWalk(record, decisions, device_bytes).run(events);
}

}  // namespace ebb
