#include "policy/managed_traffic.h"

#include <algorithm>
#include <cstddef>

#include "policy/managed_replay.h"

namespace ebb {
namespace {

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
  const ManagedPeriod period = replay_periods(uses, device_bytes, 2).back();  // the first fills the device
  ManagedTraffic traffic;
  traffic.peak_bytes = period.peak_bytes;
  for (const ManagedPeriod::Event& event : period.events) {
    const bool fetched = event.kind == ManagedPeriod::Event::Kind::kFetch;
    if (fetched || (event.kind == ManagedPeriod::Event::Kind::kLeave && event.written)) {
      ManagedTraffic::Lane& lane = (fetched ? traffic.in : traffic.out)[static_cast<std::size_t>(event.phase)];
      lane.bytes += event.bytes;
      ++lane.copies;
    }
  }
  return traffic;
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
