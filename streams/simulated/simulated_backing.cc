#include "streams/simulated/simulated_backing.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "streams/base/fault_point.h"

namespace ebb {

std::optional<Backing::Range> SimulatedBacking::grow(std::size_t bytes) {
  void* const memory =
      fails(FaultPoint::kPinnedAllocation) ? nullptr : std::aligned_alloc(BlockPool::kAlignment, bytes);
  if (memory == nullptr) {
    return std::nullopt;
  }
  slabs_.emplace_back(memory);
  return Range{reinterpret_cast<std::uint64_t>(memory), bytes};
}

void SimulatedBacking::discard(Range range) noexcept {
  std::memset(reinterpret_cast<void*>(range.address), 0xFF, range.bytes);
}

void SimulatedBacking::Free::operator()(void* memory) const noexcept { std::free(memory); }

}  // namespace ebb
