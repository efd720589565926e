#include "offload/storage_set.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace ebb {

namespace {

// Entries that are no addresses.
constexpr std::uintptr_t kNeverUsed = 0;
constexpr std::uintptr_t kForgotten = 1;

std::uintptr_t address_of(const c10::StorageImpl* identity) { return reinterpret_cast<std::uintptr_t>(identity); }

}  // namespace

void StorageSet::insert(const c10::Storage& storage) {
  if (contains(storage)) {
    return;
  }
  const std::unique_lock lock(mutex_);
  if (members_.size() >= next_cleaning_) {
    forget_the_dead();
  }
  const Identity identity = storage.unsafeGetStorageImpl();
  members_.emplace(identity, storage.getWeakStorageImpl());
  std::atomic<std::uintptr_t>& entry = entries_[entry_of(identity)];
  if (entry.load(std::memory_order_relaxed) <= kForgotten) {
    entry.store(address_of(identity), std::memory_order_relaxed);
  }
}

// Relaxed: whoever asks about a storage that was inserted on another thread has heard of that by other means.
bool StorageSet::contains(const c10::Storage& storage) const {
  const Identity identity = storage.unsafeGetStorageImpl();
  const std::uintptr_t entry = entries_[entry_of(identity)].load(std::memory_order_relaxed);
  if (entry == kNeverUsed) {
    return false;
  }
  if (entry == address_of(identity)) {
    return true;
  }
  const std::shared_lock lock(mutex_);
  return members_.find(identity) != members_.end();
}

// The high bits of a product with 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
std::size_t StorageSet::entry_of(Identity identity) {
  constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15;
  constexpr int kBits = std::bit_width(kEntries - 1);
  return (address_of(identity) * kMultiplier) >> (64 - kBits);
}

// Out of the table before its address can be another's.
void StorageSet::forget_the_dead() {
  std::erase_if(members_, [this](const auto& member) {
    const auto& [identity, storage] = member;
    if (!storage.expired()) {
      return false;
    }
    std::atomic<std::uintptr_t>& entry = entries_[entry_of(identity)];
    if (entry.load(std::memory_order_relaxed) == address_of(identity)) {
      entry.store(kForgotten, std::memory_order_relaxed);
    }
    return true;
  });
  next_cleaning_ = std::max<std::size_t>(1024, 2 * members_.size());
}

}  // namespace ebb
