#include "streams/base/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace ebb {

namespace {

void join(std::vector<Ticket>& into, const std::vector<Ticket>& from) {
  for (const Ticket& ticket : from) {
    if (ticket != nullptr && std::find(into.begin(), into.end(), ticket) == into.end()) {
      into.push_back(ticket);
    }
  }
}

}  // namespace

void RangeAllocator::add(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates) {
  if (!gates.empty()) {
    gated_.emplace(address, Gated{address + bytes, std::move(gates)});
  }
  const auto next = ranges_.lower_bound(address);
  const auto previous = next == ranges_.begin() ? ranges_.end() : std::prev(next);
  const bool touches_next = next != ranges_.end() && next->first == address + bytes;
  if (previous != ranges_.end() && previous->first + previous->second == address) {
    if (touches_next) {
      bytes += next->second;
      erase(next);
    }
    change(previous, previous->first, previous->second + bytes);
  } else if (touches_next) {
    change(next, address, bytes + next->second);
  } else {
    ranges_.emplace(address, bytes);
    by_size_.emplace(bytes, address);
  }
}

std::optional<RangeAllocator::Range> RangeAllocator::take(std::size_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) {
    return std::nullopt;
  }
  const auto [whole, address] = *fit;
  std::vector<Ticket> gates = gates_of(address, address + bytes);  // all that may throw comes before any change
  const auto range = ranges_.find(address);
  if (whole > bytes) {
    change(range, address + bytes, whole - bytes);
  } else {
    erase(range);
  }
  drop_gates(address, address + bytes);
  return Range{address, std::move(gates)};
}

std::vector<Ticket> RangeAllocator::gates() const {
  std::vector<Ticket> all;
  for (const auto& [address, gated] : gated_) {
    join(all, gated.gates);
  }
  return all;
}

// Reuses the maps' nodes, so that a pool that leases and takes back for ever allocates nothing.
void RangeAllocator::change(Ranges::iterator at, std::uint64_t address, std::size_t bytes) noexcept {
  auto by_size = by_size_.extract({at->second, at->first});
  by_size.value() = {bytes, address};
  by_size_.insert(std::move(by_size));
  auto by_address = ranges_.extract(at);
  by_address.key() = address;
  by_address.mapped() = bytes;
  ranges_.insert(std::move(by_address));
}

void RangeAllocator::erase(Ranges::iterator at) {
  by_size_.erase({at->second, at->first});
  ranges_.erase(at);
}

// Ranges are taken from their start, so no gated part begins before `begin` and reaches into the range.
std::vector<Ticket> RangeAllocator::gates_of(std::uint64_t begin, std::uint64_t end) const {
  std::vector<Ticket> gates;
  for (auto at = gated_.lower_bound(begin); at != gated_.end() && at->first < end; ++at) {
    join(gates, at->second.gates);
  }
  return gates;
}

void RangeAllocator::drop_gates(std::uint64_t begin, std::uint64_t end) noexcept {
  auto at = gated_.lower_bound(begin);
  while (at != gated_.end() && at->first < end) {
    if (at->second.end > end) {  // the rest of this part is not taken, and keeps its gates
      auto rest = gated_.extract(at);
      rest.key() = end;
      gated_.insert(std::move(rest));
      return;  // parts do not overlap
    }
    at = gated_.erase(at);
  }
}

}  // namespace ebb
