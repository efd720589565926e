#include "test/simulated/simulated_device_allocator.h"

#include <algorithm>
#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <catch2/catch.hpp>

#include "test/simulated/simulated_stream_guard.h"

namespace ebb {
namespace {

bool poisoned(const void* memory, std::size_t bytes) {
  const auto* const at = static_cast<const unsigned char*>(memory);
  return std::all_of(at, at + bytes, [](unsigned char byte) { return byte == 0xFF; });
}

TEST_CASE("allocated memory is poisoned when it is handed out and when it is freed, and is reused at once") {
  SimulatedDeviceAllocator allocator;
  c10::DataPtr first = allocator.allocate(100);
  void* const address = first.get();
  CHECK(first.device() == c10::Device(c10::kCPU));
  CHECK(reinterpret_cast<std::uintptr_t>(address) % 64 == 0);
  CHECK(poisoned(address, 100));
  std::memset(address, 1, 100);
  first.clear();
  CHECK(poisoned(address, 100));
  std::memset(address, 1, 100);  // as a copy that comes too late would
  const c10::DataPtr second = allocator.allocate(100);
  CHECK(second.get() == address);
  CHECK(poisoned(address, 100));
}

TEST_CASE("the allocator counts what is allocated now and at most") {
  SimulatedDeviceAllocator allocator;
  {
    const c10::DataPtr first = allocator.allocate(100);
    const c10::DataPtr second = allocator.allocate(50);
    CHECK(allocator.bytes().now == 150);
  }
  const c10::DataPtr third = allocator.allocate(7);
  CHECK(allocator.bytes().now == 7);
  CHECK(allocator.bytes().peak == 150);
}

TEST_CASE("memory is not shared between simulated streams") {
  SimulatedDeviceAllocator allocator;
  void* const address = allocator.allocate(100).get();
  {
    const SimulatedStreamGuard side(1);
    CHECK(allocator.allocate(100).get() != address);
  }
  CHECK(allocator.allocate(100).get() == address);
}

TEST_CASE("the raw interface, clones and empty allocations work as c10 expects") {
  SimulatedDeviceAllocator allocator;
  void* const raw = allocator.raw_allocate(8);
  std::memcpy(raw, "ebb ebb", 8);
  {
    const c10::DataPtr copy = allocator.clone(raw, 8);
    CHECK(std::memcmp(copy.get(), "ebb ebb", 8) == 0);
    CHECK(allocator.is_simple_data_ptr(copy));
  }
  allocator.raw_deallocate(raw);
  CHECK(poisoned(raw, 8));
  CHECK(allocator.allocate(0).get() == nullptr);
  CHECK(allocator.bytes().now == 0);
}

TEST_CASE("once installed it serves the process's CPU memory, until the previous one is put back") {
  SimulatedDeviceAllocator allocator;
  c10::Allocator* const previous = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&allocator, 1);
  const bool installed = c10::GetCPUAllocator() == &allocator;
  const std::uint64_t bytes = [&] {
    const c10::DataPtr data = c10::GetCPUAllocator()->allocate(123);
    return allocator.bytes().now;
  }();
  c10::SetCPUAllocator(previous, 1);
  CHECK(installed);
  CHECK(bytes == 123);
  CHECK(c10::GetCPUAllocator() == previous);
}

}  // namespace
}  // namespace ebb
