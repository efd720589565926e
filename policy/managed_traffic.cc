#include "policy/managed_traffic.h"

#include <algorithm>
#include <cstddef>

#include "policy/managed_replay.h"

namespace ebb {
namespace {

// Counts what a period moves and holds.
class Counter final : public ManagedReplay::Observer {
 public:
  void hold(Phase from, Phase to, std::uint64_t bytes) override {
    for (auto phase = static_cast<std::size_t>(from); phase <= static_cast<std::size_t>(to); ++phase) {
      traffic_.peak_bytes[phase] = std::max(traffic_.peak_bytes[phase], bytes);
    }
  }
  void fetch(const ManagedUse& use) override { count(traffic_.in, use.phase, use.bytes); }
  void leave(const ManagedUse& for_use, std::uint64_t bytes, bool written, std::size_t /*last_operation*/) override {
    if (written) {
      count(traffic_.out, for_use.phase, bytes);
    }
  }

  [[nodiscard]] const ManagedTraffic& traffic() const { return traffic_; }

 private:
  static void count(EachPhase<ManagedTraffic::Lane>& lanes, Phase phase, std::uint64_t bytes) {
    ManagedTraffic::Lane& lane = lanes[static_cast<std::size_t>(phase)];
    lane.bytes += bytes;
    ++lane.copies;
  }

  ManagedTraffic traffic_;
};

std::uint64_t bytes_of(const EachPhase<ManagedTraffic::Lane>& lanes) {
  std::uint64_t bytes = 0;
  for (const ManagedTraffic::Lane& lane : lanes) {
    bytes += lane.bytes;
  }
  return bytes;
}

}  // namespace

std::uint64_t ManagedTraffic::in_bytes() const { return bytes_of(in); }

std::uint64_t ManagedTraffic::out_bytes() const { return bytes_of(out); }

ManagedTraffic managed_traffic(std::span<const ManagedUse> uses, std::uint64_t device_bytes) {
  ManagedReplay replay(uses, device_bytes);
  ManagedReplay::Observer nothing;
  replay.pass_period(nothing);  // from an empty device to one as at every period's beginning
  Counter counter;
  replay.pass_period(counter);
  return counter.traffic();
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
