#include "examples/common/counting_allocator.h"

#include <cstddef>

#include <c10/core/CPUAllocator.h>

namespace ebb {
namespace {

// Room before each allocation for its size, which lies right before the data. As large as the alignment that the data
// is to keep: LibTorch's, or that of large blocks to a page, on which ebb's spill file relies.
constexpr std::size_t kHeaderBytes = c10::gAlignment;
constexpr std::size_t kLargeHeaderBytes = 4096;
constexpr std::size_t kLargeBytes = std::size_t{256} << 10;
static_assert(kHeaderBytes >= sizeof(std::size_t));

constexpr std::size_t header_bytes(std::size_t bytes) {
  return bytes >= kLargeBytes ? kLargeHeaderBytes : kHeaderBytes;
}

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
  auto* const base = static_cast<std::byte*>(inner_.raw_allocate(bytes + header_bytes(bytes)));
  auto* const data = base + header_bytes(bytes);
  *reinterpret_cast<std::size_t*>(data - kHeaderBytes) = bytes;
  const std::uint64_t now = now_ += bytes;
  std::uint64_t peak = peak_;
  while (peak < now && !peak_.compare_exchange_weak(peak, now)) {
  }
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
  auto* const start = static_cast<std::byte*>(data);
  const std::size_t bytes = *reinterpret_cast<const std::size_t*>(start - kHeaderBytes);
  installed->now_ -= bytes;
  installed->inner_.raw_deallocate(start - header_bytes(bytes));
}

}  // namespace ebb
