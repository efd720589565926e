#include "test/simulated/simulated_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "test/checked/checked_tier.h"

namespace ebb {

namespace {

constexpr std::size_t kAlignment = 64;  // ATen's for CPU tensors, and the room kept for the header
constexpr int kPoison = 0xFF;

}  // namespace

// The header just before the bytes handed out, because a c10 deleter gets nothing but their address.
struct SimulatedMemory::Header {
  SimulatedMemory* owner;
  c10::StreamId stream;
  std::size_t bytes;
};

void* SimulatedMemory::take(std::size_t bytes, c10::StreamId stream) {
  static_assert(sizeof(Header) <= kAlignment);
  const MutexLock lock(mutex_);
  bytes_.now += bytes;
  bytes_.peak = std::max(bytes_.peak, bytes_.now);
  std::vector<void*>& free = free_[{stream, bytes}];
  if (!free.empty()) {
    void* const address = free.back();
    free.pop_back();
    return address;
  }
  void* const memory = std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  all_.emplace_back(memory);
  void* const address = static_cast<std::byte*>(memory) + kAlignment;
  new (memory) Header{this, stream, bytes};
  poison(address);
  return address;
}

void SimulatedMemory::give(void* address) noexcept {
  const Header& given = header(address);
  const MutexLock lock(mutex_);
  free_[{given.stream, given.bytes}].push_back(address);
  bytes_.now -= given.bytes;
}

void SimulatedMemory::poison(void* address) noexcept { std::memset(address, kPoison, header(address).bytes); }

std::size_t SimulatedMemory::bytes_of(void* address) { return header(address).bytes; }

SimulatedMemory& SimulatedMemory::owner(void* address) { return *header(address).owner; }

SimulatedMemory::Bytes SimulatedMemory::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

void SimulatedMemory::reset_peak() {
  const MutexLock lock(mutex_);
  bytes_.peak = bytes_.now;
}

SimulatedMemory::Header& SimulatedMemory::header(void* address) {
  return *reinterpret_cast<Header*>(static_cast<std::byte*>(address) - kAlignment);
}

void SimulatedMemory::Free::operator()(void* memory) const noexcept {
  observe_gone(static_cast<std::byte*>(memory) + kAlignment, static_cast<const Header*>(memory)->bytes);
  std::free(memory);
}

}  // namespace ebb
