#include "policy/room.h"

#include <algorithm>
#include <limits>

#include "policy/levels_ahead.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNoBound = std::numeric_limits<std::uint64_t>::max();

std::uint64_t less(std::uint64_t bytes, std::uint64_t by) { return bytes > by ? bytes - by : 0; }

// A source that the forward pass still uses is in the stash and in the other memory, but takes room once.
class StashWalk {
 public:
  StashWalk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record), decisions_(decisions), device_bytes_(device_bytes) {}

  StashRoom run(const std::vector<StepEvent>& events) {
    StashRoom room{std::vector<std::uint64_t>(decisions_.size(), kNoBound), kNoBound};
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
        *bound = std::min(*bound, less(device_bytes_ + in_use_, other_ + kept_));
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
    if (decisions_[i] == Decision::kRecompute) {
      kept_ += record_.storages[i].bytes;
    }
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
  std::uint64_t kept_ = 0;  // and recomputed
  bool in_backward_ = false;
  std::uint64_t in_use_ = 0;  // of what is offloaded, by the forward pass
};

class CopyList {
 public:
  CopyList(const StepRecord& record, const std::vector<Decision>& decisions)
      : record_(record), decisions_(decisions), listed_(decisions.size()) {}

  void add(std::uint32_t i, double needed_ms) {
    if (listed_[i]) {
      return;
    }
    listed_[i] = true;
    if (decisions_[i] == Decision::kRecompute) {  // its inputs before it
      for (const std::uint32_t input : record_.storages[i].inputs) {
        add(input, needed_ms);
      }
    } else if (decisions_[i] == Decision::kOffload) {
      copies.push_back({i, needed_ms});
    }
  }

  std::vector<NeededCopy> copies;

 private:
  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  std::vector<bool> listed_;
};

struct BackwardLevels {
  std::vector<StepRecord::Level> levels;
  std::vector<std::uint32_t> of_need;  // all storages, in that order
};

// What copies in have to leave room for: other memory, and what will be recomputed before the next of them is asked
// for. (What has been recomputed by then counts twice, as held and here.)
BackwardLevels backward_levels(const StepRecord& record, const std::vector<StepEvent>& events,
                               const std::vector<Decision>& decisions) {
  BackwardLevels result;
  std::uint64_t other = 0;
  std::uint64_t recomputed = 0;
  for (const StepEvent& event : events) {
    const bool is_recomputed = event.what != StepEvent::What::kLevel && event.what != StepEvent::What::kBackward &&
                               decisions[event.index] == Decision::kRecompute;
    if (event.what == StepEvent::What::kNeed) {
      result.of_need.push_back(event.index);
    }
    if (event.what == StepEvent::What::kLevel) {
      other = record.other[event.index].bytes;
    } else if (event.what == StepEvent::What::kNeed && is_recomputed) {
      recomputed += record.storages[event.index].bytes;
    } else if (event.what == StepEvent::What::kRelease && is_recomputed) {
      recomputed -= record.storages[event.index].bytes;
    } else {
      continue;
    }
    result.levels.push_back({event.ms, other + recomputed});
  }
  return result;
}

// The first of the levels that hold at `ms`: what begins there counts, and else what began before.
std::size_t first_level(const std::vector<StepRecord::Level>& levels, double ms) {
  const auto next = std::ranges::lower_bound(levels, ms, {}, &StepRecord::Level::ms);
  const auto index = static_cast<std::size_t>(next - levels.begin());
  return index > 0 && (next == levels.end() || next->ms > ms) ? index - 1 : index;
}

}  // namespace

std::vector<NeededCopy> needed_copies(const StepRecord& record, const std::vector<Decision>& decisions,
                                      const std::vector<std::uint32_t>& of_need) {
  CopyList list(record, decisions);
  for (const std::uint32_t i : of_need) {
    list.add(i, record.storages[i].needed_ms);
  }
  return std::move(list.copies);
}

StashRoom stash_room(const StepRecord& record, const std::vector<StepEvent>& events,
                     const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return StashWalk(record, decisions, device_bytes).run(events);
}

Room make_room(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  const std::vector<StepEvent> events = step_events(record);
  Room room{stash_room(record, events, decisions, device_bytes), {}};
  const auto [levels, of_need] = backward_levels(record, events, decisions);
  LevelsAhead ahead(levels);
  std::size_t level = first_level(levels, record.backward_ms);
  for (const NeededCopy& copy : needed_copies(record, decisions, of_need)) {
    // It is on the device until it is released, whatever is needed before that.
    const double until_ms = std::max(copy.needed_ms, record.storages[copy.storage].released_ms);
    const std::uint64_t most = ahead.most(level, until_ms);
    room.copies_in.push_back({copy.storage, device_bytes == kNoBound ? kNoBound : less(device_bytes, most)});
    level = first_level(levels, copy.needed_ms);
  }
  return room;
}

}  // namespace ebb
