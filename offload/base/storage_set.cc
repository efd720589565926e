#include "offload/base/storage_set.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

namespace ebb {

namespace {

std::uintptr_t address_of(const c10::StorageImpl* identity) { return reinterpret_cast<std::uintptr_t>(identity); }

}  // namespace

void StorageSet::insert(const c10::Storage& storage) {
  if (contains(storage)) {
    return;
  }
  const MutexLock lock(mutex_);
  if (members_.size() >= next_cleaning_) {
    forget_the_dead();
  }
  const Identity identity = storage.unsafeGetStorageImpl();
  members_.emplace(identity, storage.getWeakStorageImpl());
  std::atomic<std::uintptr_t>& entry = entries_[entry_of(identity)];
  if (entry.load(std::memory_order_relaxed) == 0) {
    entry.store(address_of(identity), std::memory_order_relaxed);
  }
}

bool StorageSet::contains(const c10::Storage& storage) const {
  const Identity identity = storage.unsafeGetStorageImpl();
  const std::uintptr_t entry = entries_[entry_of(identity)].load(std::memory_order_relaxed);
  if (entry == 0) {
    return false;
  }
  if (entry == address_of(identity)) {
    return true;
  }
  const SharedLock lock(mutex_);
  return members_.find(identity) != members_.end();
}

// The high bits of a product with 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
std::size_t StorageSet::entry_of(Identity identity) {
  constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15;
  constexpr int kBits = std::bit_width(kEntries - 1);
  return (address_of(identity) * kMultiplier) >> (64 - kBits);
}

// A thread that asks for a living member meanwhile sees this or another member in the table's entry, and never 0.
void StorageSet::forget_the_dead() {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> dead;  // its end frees their addresses
  dead.reserve(members_.size());
  std::vector<std::uintptr_t> entries(kEntries);
  for (auto member = members_.begin(); member != members_.end();) {
    if (member->second.expired()) {
      dead.push_back(std::move(member->second));
      member = members_.erase(member);
    } else {
      entries[entry_of(member->first)] = address_of(member->first);
      ++member;
    }
  }
  for (std::size_t i = 0; i < kEntries; ++i) {
    entries_[i].store(entries[i], std::memory_order_relaxed);
  }
  next_cleaning_ = std::max<std::size_t>(1024, 2 * members_.size());
}

}  // namespace ebb
