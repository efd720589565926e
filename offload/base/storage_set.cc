#include "offload/base/storage_set.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ebb {

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

bool StorageSet::is_member(Identity identity) const {
  const SharedLock lock(mutex_);
  return members_.contains(identity);
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
