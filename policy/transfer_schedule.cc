#include "policy/transfer_schedule.h"

#include <algorithm>
#include <limits>

#include "policy/made_again.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();

std::uint64_t less(std::uint64_t bytes, std::uint64_t by) { return bytes > by ? bytes - by : 0; }

// Walks through the step and finds the stash's bounds. A source that the forward pass still uses is both in the stash
// and in the other memory, but takes memory only once, so the bounds are raised by such sources.
class StashWalk {
 public:
  StashWalk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record), decisions_(decisions), device_bytes_(device_bytes), made_again_(record, decisions) {}

  StashSchedule run(const std::vector<StepEvent>& events) {
    StashSchedule room{std::vector<std::uint64_t>(decisions_.size(), kNoBound), kNoBound};
    if (device_bytes_ == kNoBound) {
      return room;
    }
    std::uint64_t* bound = nullptr;
    for (const StepEvent& event : events) {
      switch (event.what) {
        case StepEvent::What::kLevel:
          other_ = record_.other[event.index].bytes;
          break;
        case StepEvent::What::kSave:
          save(event.index);
          bound = &room.after_save[event.index];
          *bound = in_backward_ ? 0 : kNoBound;
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
  void save(std::uint32_t i) {
    if (decisions_[i] == Decision::kOffload) {
      in_use_ += record_.storages[i].bytes;
    }
  }

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

}  // namespace

StashSchedule stash_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                             const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return StashWalk(record, decisions, device_bytes).run(events);
}

TransferSchedule make_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                               const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return {stash_schedule(record, events, decisions, device_bytes),
          prefetch_schedule(record, events, decisions, device_bytes)};
}

}  // namespace ebb
