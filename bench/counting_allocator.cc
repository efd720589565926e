#include "bench/counting_allocator.h"

#include <cstddef>

#include <c10/core/CPUAllocator.h>

namespace ebb {
namespace {

// Room before each allocation for its size. As large as LibTorch's alignment, so that the data keeps that alignment.
constexpr std::size_t kHeaderBytes = c10::gAlignment;
static_assert(kHeaderBytes >= sizeof(std::size_t));

constexpr std::uint8_t kPriority = 1;  // over the default allocator's 0

CountingAllocator* installed = nullptr;

}  // namespace

CountingAllocator& CountingAllocator::install() {
  if (installed == nullptr) {
    installed = new CountingAllocator(*c10::GetCPUAllocator());  // never deleted: tensors outlive main
    c10::SetCPUAllocator(installed, kPriority);
  }
  return *installed;
}

c10::DataPtr CountingAllocator::allocate(std::size_t bytes) {
  if (bytes == 0) {
    return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
  }
  auto* const base = static_cast<std::byte*>(inner_.raw_allocate(bytes + kHeaderBytes));
  *reinterpret_cast<std::size_t*>(base) = bytes;
  const std::uint64_t now = now_ += bytes;
  std::uint64_t peak = peak_;
  while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
  }
  void* const data = base + kHeaderBytes;
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr CountingAllocator::raw_deleter() const { return &release; }

void CountingAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  default_copy_data(to, from, bytes);
}

void CountingAllocator::release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto* const base = static_cast<std::byte*>(data) - kHeaderBytes;
  installed->now_ -= *reinterpret_cast<const std::size_t*>(base);
  installed->inner_.raw_deallocate(base);
}

}  // namespace ebb
