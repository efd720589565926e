#include "policy/managed_traffic.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ebb {
namespace {

using Place = std::size_t;  // counts uses from the first period's beginning

// The device, as it is while periods go by.
class Device {
 public:
  Device(std::span<const ManagedUse> uses, std::uint64_t limit) : uses_(uses), limit_(limit), next_(next_uses()) {}

  // `traffic`: what the period adds to; null for nothing.
  void pass_period(ManagedTraffic* traffic) {
    traffic_ = traffic;
    Phase phase = Phase::kForward;
    note_held(phase, phase);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      note_held(phase, uses_[i].phase);
      phase = uses_[i].phase;
      use(i);
    }
    note_held(phase, Phase::kBetween);
    begin_ += uses_.size();
  }

 private:
  struct There {
    std::uint64_t bytes;
    Place next;       // the next use
    Place operation;  // the beginning of the last operation that used the storage
    bool written;
  };

  // For each use, how many uses later the same item is used next, in the same period or the following one.
  [[nodiscard]] std::vector<std::size_t> next_uses() const {
    std::vector<std::size_t> next(uses_.size());
    std::unordered_map<std::uint32_t, std::size_t> later;
    for (std::size_t i = 2 * uses_.size(); i-- > 0;) {
      const std::uint32_t item = uses_[i % uses_.size()].item;
      if (i < uses_.size()) {
        next[i] = later.at(item) - i;  // the second period has every item
      }
      later[item] = i;
    }
    return next;
  }

  void use(std::size_t i) {
    const ManagedUse& use = uses_[i];
    if (i == 0 || use.operation != uses_[i - 1].operation) {
      operation_ = begin_ + i;
    }
    const auto known = there_.find(use.item);
    bool written = use.written;
    if (known != there_.end()) {
      written = written || (known->second.written && !use.is_new);
      forget(known);
    } else if (!use.is_new) {
      count(&ManagedTraffic::in, use.phase, use.bytes);
    }
    make_room(use);
    const Place next = begin_ + i + next_[i];
    there_.insert_or_assign(use.item, There{use.bytes, next, operation_, written});
    order_.emplace(next, use.item);
    held_ += use.bytes;
    note_held(use.phase, use.phase);
    if (uses_[(i + next_[i]) % uses_.size()].is_new) {  // this was the storage's last use
      forget(there_.find(use.item));
    }
  }

  // What is held now is held in these phases, and in those between them.
  void note_held(Phase from, Phase to) {
    for (auto phase = static_cast<std::size_t>(from); traffic_ != nullptr && phase <= static_cast<std::size_t>(to);
         ++phase) {
      traffic_->peak_bytes[phase] = std::max(traffic_->peak_bytes[phase], held_);
    }
  }

  void make_room(const ManagedUse& use) {
    for (auto last = order_.rbegin(); held_ + use.bytes > limit_ && last != order_.rend();) {
      const auto leaves = there_.find(last->second);
      if (leaves->second.operation == operation_) {
        ++last;
        continue;
      }
      if (leaves->second.written) {
        count(&ManagedTraffic::out, use.phase, leaves->second.bytes);
      }
      forget(leaves);
      last = order_.rbegin();
    }
  }

  void forget(std::unordered_map<std::uint32_t, There>::iterator there) {
    order_.erase({there->second.next, there->first});
    held_ -= there->second.bytes;
    there_.erase(there);
  }

  void count(EachPhase<ManagedTraffic::Lane> ManagedTraffic::*lanes, Phase phase, std::uint64_t bytes) {
    if (traffic_ != nullptr) {
      ManagedTraffic::Lane& lane = (traffic_->*lanes)[static_cast<std::size_t>(phase)];
      lane.bytes += bytes;
      ++lane.copies;
    }
  }

  const std::span<const ManagedUse> uses_;
  const std::uint64_t limit_;
  const std::vector<std::size_t> next_;
  std::unordered_map<std::uint32_t, There> there_;
  std::set<std::pair<Place, std::uint32_t>> order_;  // by next use
  std::uint64_t held_ = 0;
  Place begin_ = 0;      // of the period
  Place operation_ = 0;  // the beginning of the present operation
  ManagedTraffic* traffic_ = nullptr;
};

}  // namespace

std::uint64_t ManagedTraffic::bytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t phase = 0; phase < kPhases; ++phase) {
    bytes += in[phase].bytes + out[phase].bytes;
  }
  return bytes;
}

ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t device_bytes) {
  ManagedTraffic traffic;
  Device device(uses, device_bytes);
  device.pass_period(nullptr);  // from an empty device to one as at every period's beginning
  device.pass_period(&traffic);
  return traffic;
}

std::uint64_t fetched_ahead(std::uint64_t device_bytes) {
  constexpr std::uint64_t kMost = 2'000'000'000;
  return std::min(device_bytes / 2, kMost);
}

std::uint64_t largest_operation(std::span<const ManagedUse> uses, Phase phase) {
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < uses.size();) {
    std::uint64_t bytes = 0;
    const std::uint32_t operation = uses[i].operation;
    for (; i < uses.size() && uses[i].operation == operation; ++i) {
      bytes += uses[i].phase == phase ? uses[i].bytes : 0;
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

}  // namespace ebb
