#include "test/simulated/simulated_device_allocator.h"

#include <c10/util/Exception.h>

#include "test/checked/checked_tier.h"
#include "test/simulated/simulated_stream_guard.h"

namespace ebb {

namespace {

void give_poisoned(void* address) {
  if (address != nullptr) {
    observe_freed(address, SimulatedMemory::bytes_of(address));
    SimulatedMemory::poison(address);
    SimulatedMemory::owner(address).give(address);
  }
}

}  // namespace

c10::DataPtr SimulatedDeviceAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) {
    return {nullptr, nullptr, &give_poisoned, c10::Device(c10::kCPU)};
  }
  if (before_each_) {
    before_each_();
  }
  find_room(bytes);
  void* const address = memory_.take(bytes, SimulatedStreamGuard::current());
  SimulatedMemory::poison(address);
  return {address, address, &give_poisoned, c10::Device(c10::kCPU)};
}

void SimulatedDeviceAllocator::find_room(std::size_t bytes) {
  const auto is_short = [&]() -> std::uint64_t {
    const std::uint64_t wanted = limit_ ? memory_.bytes().now + bytes : 0;
    return limit_ && wanted > limit_->bytes ? wanted - limit_->bytes : 0;
  };
  while (const std::uint64_t missing = is_short()) {
    TORCH_CHECK_WITH(OutOfMemoryError, limit_->make_room(missing), "the simulated device has no ", missing,
                     " bytes more");
  }
}

c10::DeleterFnPtr SimulatedDeviceAllocator::raw_deleter() const { return &give_poisoned; }

void SimulatedDeviceAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

}  // namespace ebb
