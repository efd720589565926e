#include "policy/transfer_schedule.h"

#include <algorithm>
#include <utility>

#include "policy/budget.h"

namespace ebb {
namespace {

std::uint64_t less(std::uint64_t bytes, std::uint64_t by) { return bytes > by ? bytes - by : 0; }

// The storages that recipes have made so far, in a walk through a step under given decisions.
class MadeAgain {
 public:
  // `record` and `decisions` must outlive this object.
  MadeAgain(const StepRecord& record, const std::vector<Decision>& decisions)
      : record_(record), decisions_(decisions), made_(decisions.size()) {}

  [[nodiscard]] bool contains(std::uint32_t storage) const { return made_[storage]; }

  // Makes `storage`, if it is to be recomputed and has not been made yet; the recipe's inputs are made first. Calls
  // each(made), with the StorageRecord, for every storage that is made, in the order of making.
  template <typename Each>
  void add(std::uint32_t storage, const Each& each) {
    if (decisions_[storage] != Decision::kRecompute || made_[storage]) {
      return;
    }
    made_[storage] = true;
    for (const std::uint32_t input : record_.storages[storage].inputs) {
      add(input, each);
    }
    each(record_.storages[storage]);
  }

 private:
  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  std::vector<bool> made_;
};

// Walks through the step and finds the stash's bounds. A source that the forward pass still uses is both in the stash
// and in the other memory, but takes memory only once, so the bounds are raised by such sources.
class StashWalk {
 public:
  StashWalk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record), decisions_(decisions), device_bytes_(device_bytes), made_again_(record, decisions) {}

  StashSchedule run(const std::vector<StepEvent>& events) {
    StashSchedule room{std::vector<std::uint64_t>(decisions_.size(), kUnlimited), kUnlimited};
    if (device_bytes_ == kUnlimited) {
      return room;
    }
    std::uint64_t* bound = nullptr;
    for (const StepEvent& event : events) {
      switch (event.what) {
        case StepEvent::What::kLevel:
          other_ = record_.other[event.index].bytes;
          break;
        case StepEvent::What::kSave:
          in_use_ += decisions_[event.index] == Decision::kOffload ? record_.storages[event.index].bytes : 0;
          bound = &room.after_save[event.index];
          *bound = in_backward_ ? 0 : kUnlimited;
          break;
        case StepEvent::What::kIdle:
          idle(event.index);
          break;
        case StepEvent::What::kBackward:
          bound = &room.in_backward;
          break;
        case StepEvent::What::kNeed:
          in_backward_ = true;
          need(event.index);
          bound = &room.in_backward;
          break;
        case StepEvent::What::kRelease:
          release(event.index);
          break;
      }
      if (bound != nullptr && !(in_backward_ && bound != &room.in_backward)) {
        *bound = std::min(*bound, less(device_bytes_ + in_use_, other_with_recipes(event) + kept_));
      }
    }
    return room;
  }

 private:
  void idle(std::uint32_t i) {
    const std::uint64_t bytes = record_.storages[i].bytes;
    if (decisions_[i] == Decision::kOffload) {
      in_use_ -= bytes;
    } else if (decisions_[i] == Decision::kKeep) {
      kept_ += bytes;
    }
  }

  void need(std::uint32_t i) {
    recipes_bytes_ = 0;
    made_again_.add(i, [&](const StorageRecord& made) {
      kept_ += made.bytes;
      recipes_bytes_ = std::max(recipes_bytes_, record_.storages[i].other_bytes + made.recompute_bytes);
    });
  }

  // The other memory, including what the recipes of this need take for themselves. (The memory of an inner recipe
  // counts beside the results of all these recipes.)
  [[nodiscard]] std::uint64_t other_with_recipes(const StepEvent& event) const {
    return event.what == StepEvent::What::kNeed ? std::max(other_, recipes_bytes_) : other_;
  }

  void release(std::uint32_t i) {
    if (decisions_[i] != Decision::kOffload) {
      kept_ -= std::min(kept_, record_.storages[i].bytes);
    }
  }

  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  const std::uint64_t device_bytes_;
  std::uint64_t other_ = 0;
  std::uint64_t kept_ = 0;           // of kept storages, and of recomputed storages once made
  std::uint64_t recipes_bytes_ = 0;  // the other memory at the last need, with what its recipes take for themselves
  MadeAgain made_again_;
  bool in_backward_ = false;
  std::uint64_t in_use_ = 0;  // of offloaded storages that the forward pass still uses
};

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
          room_.held_bytes.back() = kUnlimited;
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
    room_.held_bytes.push_back(kUnlimited);
    lower();
  }

  void lower() { lower_for(other_); }

  void lower_for(std::uint64_t other) {
    if (device_bytes_ != kUnlimited && !room_.held_bytes.empty()) {
      room_.held_bytes.back() = std::min(room_.held_bytes.back(), less(device_bytes_, other + recomputed_));
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

TransferSchedule make_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                               const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return {StashWalk(record, decisions, device_bytes).run(events),
          BackwardWalk(record, decisions, device_bytes).run(events)};
}

}  // namespace ebb
