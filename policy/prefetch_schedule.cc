#include <algorithm>
#include <limits>
#include <utility>

#include "policy/made_again.h"
#include "policy/transfer_schedule.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();

// Walks through backward and finds the parts and their bounds. Recomputed storages that are not yet released count with
// the record's other memory.
class BackwardWalk {
 public:
  BackwardWalk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record),
        decisions_(decisions),
        device_bytes_(device_bytes),
        need_part_(decisions.size()),
        release_part_(decisions.size()),
        made_again_(record, decisions),
        listed_(decisions.size()) {}

  PrefetchSchedule run(const std::vector<StepEvent>& events) {
    room_.needed.reserve(decisions_.size());
    room_.held_bytes.reserve(decisions_.size() + 1);
    for (const StepEvent& event : events) {
      take(event);
    }
    if (room_.held_bytes.empty()) {
      begin_part();
    }
    for (const std::uint32_t i : room_.needed) {
      list_copies(i, need_part_[i]);
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
        if (room_.held_bytes.empty()) {  // a need that comes before backward begins
          begin_part();
        }
        room_.needed.push_back(event.index);
        begin_part();
        made_again_.add(event.index, [&](const StorageRecord& made) {
          recomputed_ += made.bytes;
          lower_for(record_.storages[event.index].other_bytes + made.recompute_bytes);
        });
        lower();
        need_part_[event.index] = part();
        return;
      case StepEvent::What::kRelease:
        release_part_[event.index] = part();
        if (made_again_.contains(event.index)) {
          recomputed_ -= record_.storages[event.index].bytes;
        }
        return;
      case StepEvent::What::kSave:
      case StepEvent::What::kIdle:
        return;
    }
  }

  // The index of the present part.
  [[nodiscard]] std::uint32_t part() const { return static_cast<std::uint32_t>(room_.held_bytes.size() - 1); }

  void begin_part() {
    room_.held_bytes.push_back(kNoBound);
    lower();
  }

  void lower() { lower_for(other_); }

  void lower_for(std::uint64_t other) {
    if (device_bytes_ != kNoBound && !room_.held_bytes.empty()) {
      const std::uint64_t taken = other + recomputed_;
      room_.held_bytes.back() = std::min(room_.held_bytes.back(), device_bytes_ - std::min(device_bytes_, taken));
    }
  }

  // Lists the copies in that the need of storage `i` takes: the copy of `i`, or the copies of its recipe's inputs.
  void list_copies(std::uint32_t i, std::uint32_t need_part) {
    if (listed_[i]) {
      return;
    }
    listed_[i] = true;
    if (decisions_[i] == Decision::kRecompute) {
      for (const std::uint32_t input : record_.storages[i].inputs) {
        list_copies(input, need_part);
      }
    } else if (decisions_[i] == Decision::kOffload) {
      // The storage stays on the device from its copy in until its release.
      room_.copies_in.push_back({i, std::max(need_part, release_part_[i])});
    }
  }

  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  const std::uint64_t device_bytes_;
  std::uint64_t other_ = 0;
  std::uint64_t recomputed_ = 0;
  bool level_is_of_forward_ = false;         // in the first part, until a level or a need takes over
  std::vector<std::uint32_t> need_part_;     // by storage: the part that begins with its need
  std::vector<std::uint32_t> release_part_;  // by storage: the part in which the storage is released
  MadeAgain made_again_;                     // the storages that recipes have made
  std::vector<bool> listed_;
  PrefetchSchedule room_;
};

}  // namespace

PrefetchSchedule prefetch_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                                   const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return BackwardWalk(record, decisions, device_bytes).run(events);
}

}  // namespace ebb
