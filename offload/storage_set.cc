#include "offload/storage_set.h"

#include <algorithm>

namespace ebb {

void StorageSet::insert(const c10::Storage& storage) {
  if (contains(storage)) {
    return;
  }
  const std::unique_lock lock(mutex_);
  if (members_.size() >= next_cleaning_) {
    forget_the_dead();
  }
  members_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
}

bool StorageSet::contains(const c10::Storage& storage) const {
  const std::shared_lock lock(mutex_);
  return members_.find(storage.unsafeGetStorageImpl()) != members_.end();
}

void StorageSet::forget_the_dead() {
  std::erase_if(members_, [](const auto& member) { return member.second.expired(); });
  next_cleaning_ = std::max<std::size_t>(1024, 2 * members_.size());
}

}  // namespace ebb
