#include "policy/transfer_schedule.h"

#include <algorithm>
#include <utility>

#include "policy/budget.h"

namespace ebb {
namespace {

using Index = std::uint32_t;

std::uint64_t less(std::uint64_t bytes, std::uint64_t by) { return bytes > by ? bytes - by : 0; }

// Walks through the step, and finds the stash's bounds, and the parts of backward with theirs.
class Walk {
 public:
  Walk(const StepRecord& record, const std::vector<Decision>& decisions, std::uint64_t device_bytes)
      : record_(record),
        decisions_(decisions),
        device_bytes_(device_bytes),
        brought_(decisions.size()),
        release_part_(decisions.size()),
        not_held_(not_held(record, decisions)),
        stash_{std::vector<std::uint64_t>(decisions.size(), kUnlimited), kUnlimited} {}

  TransferSchedule run(const std::vector<StepEvent>& events) {
    backward_.needed.reserve(decisions_.size());
    backward_.held_bytes.reserve(decisions_.size() + 1);
    for (const StepEvent& event : events) {
      const bool is_of_storage = event.what != StepEvent::What::kLevel && event.what != StepEvent::What::kBackward;
      if (is_of_storage && !not_held_.empty() && not_held_[event.index]) {
        continue;
      }
      take(event);
      lower_stash(event.what == StepEvent::What::kNeed ? std::max(other_, recipes_bytes_) : other_);
    }
    for (auto& [i, last_part] : backward_.copies_in) {  // a storage stays from its copy in until its release
      last_part = std::max(last_part, release_part_[i]);
    }
    return {std::move(stash_), std::move(backward_)};
  }

 private:
  void take(const StepEvent& event) {
    const Index i = event.index;
    switch (event.what) {
      case StepEvent::What::kLevel:
        other_ = record_.other[i].bytes;
        if (event.ms == record_.backward_ms && std::exchange(level_is_of_forward_, false)) {
          backward_.held_bytes.back() = kUnlimited;
        }
        lower_part(other_);
        break;
      case StepEvent::What::kSave:
        in_use_ += decisions_[i] == Decision::kOffload ? record_.storages[i].bytes : 0;
        stash_bound_ = &stash_.after_save[i];
        *stash_bound_ = has_asked_ && device_bytes_ != kUnlimited ? 0 : kUnlimited;
        break;
      case StepEvent::What::kIdle:
        in_use_ -= decisions_[i] == Decision::kOffload ? record_.storages[i].bytes : 0;
        kept_ += decisions_[i] == Decision::kKeep ? record_.storages[i].bytes : 0;
        break;
      case StepEvent::What::kBackward:
        stash_bound_ = &stash_.in_backward;
        if (backward_.held_bytes.empty()) {
          begin_part();
          level_is_of_forward_ = true;
        }
        break;
      case StepEvent::What::kNeed:
        need(i);
        break;
      case StepEvent::What::kRelease:
        release_part_[i] = part();
        kept_ -= decisions_[i] == Decision::kKeep ? std::min(kept_, record_.storages[i].bytes) : 0;
        recomputed_ -= brought_[i] && decisions_[i] == Decision::kRecompute ? record_.storages[i].bytes : 0;
        break;
    }
  }

  void need(Index i) {
    has_asked_ = true;
    stash_bound_ = &stash_.in_backward;
    level_is_of_forward_ = false;
    if (backward_.held_bytes.empty()) {  // a need that comes before backward begins
      begin_part();
    }
    backward_.needed.push_back(i);
    begin_part();
    recipes_bytes_ = 0;
    bring(i, record_.storages[i].other_bytes);
    lower_part(other_);
  }

  // Copies the storage in, or makes it again, its recipe's inputs first, where this has not been done yet. `other`: the
  // other memory meanwhile. (The memory of an inner recipe counts beside the results of all these recipes.)
  void bring(Index i, std::uint64_t other) {
    if (brought_[i]) {
      return;
    }
    brought_[i] = true;
    if (decisions_[i] == Decision::kOffload) {
      backward_.copies_in.push_back({i, part()});
    } else if (decisions_[i] == Decision::kRecompute) {
      const StorageRecord& storage = record_.storages[i];
      for (const Index input : storage.inputs) {
        bring(input, other);
      }
      std::uint64_t own_bytes = storage.recompute_bytes;
      for_each_made_with(record_, i, [&](Index made) {
        const bool is_to_be_made = made == i || (decisions_[made] == Decision::kRecompute && !brought_[made]);
        (is_to_be_made ? recomputed_ : own_bytes) += record_.storages[made].bytes;
        brought_[made] = brought_[made] || is_to_be_made;
      });
      recipes_bytes_ = std::max(recipes_bytes_, other + own_bytes);
      lower_part(other + own_bytes);
    }
  }

  // A source that the forward pass still uses is both in the stash and in the other memory, but takes memory only once,
  // so the bound is raised by such sources.
  void lower_stash(std::uint64_t other) {
    if (device_bytes_ != kUnlimited && stash_bound_ != nullptr) {
      *stash_bound_ = std::min(*stash_bound_, less(device_bytes_ + in_use_, other + kept_ + recomputed_));
    }
  }

  // The index of the present part.
  [[nodiscard]] Index part() const { return static_cast<Index>(backward_.held_bytes.size() - 1); }

  void begin_part() {
    backward_.held_bytes.push_back(kUnlimited);
    lower_part(other_);
  }

  void lower_part(std::uint64_t other) {
    if (device_bytes_ != kUnlimited && !backward_.held_bytes.empty()) {
      std::uint64_t& bound = backward_.held_bytes.back();
      bound = std::min(bound, less(device_bytes_, other + recomputed_));
    }
  }

  const StepRecord& record_;
  const std::vector<Decision>& decisions_;
  const std::uint64_t device_bytes_;

  std::uint64_t other_ = 0;
  std::uint64_t in_use_ = 0;              // of offloaded storages that the forward pass still uses
  std::uint64_t kept_ = 0;                // of kept storages that it has let go of
  std::uint64_t recomputed_ = 0;          // of storages that recipes have made and that are not yet released
  std::uint64_t recipes_bytes_ = 0;       // the most other memory of the last need, with its recipes' own
  std::vector<bool> brought_;             // by storage: whether bring() has been called
  bool has_asked_ = false;                // backward has asked for a storage
  std::uint64_t* stash_bound_ = nullptr;  // of the stash at present
  bool level_is_of_forward_ = false;      // in the first part, until a level or a need takes over
  std::vector<Index> release_part_;       // by storage: the part in which the storage is released
  const std::vector<bool> not_held_;      // by storage; empty for none
  StashSchedule stash_;
  PrefetchSchedule backward_;
};

}  // namespace

TransferSchedule make_schedule(const StepRecord& record, const std::vector<StepEvent>& events,
                               const std::vector<Decision>& decisions, std::uint64_t device_bytes) {
  return Walk(record, decisions, device_bytes).run(events);
}

}  // namespace ebb
