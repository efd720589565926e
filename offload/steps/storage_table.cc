#include "offload/steps/storage_table.h"

namespace ebb {

std::shared_ptr<SavedStorage> StorageTable::find(const c10::Storage& storage, const VersionId& version) {
  const MutexLock lock(mutex_);
  const auto found = entries_.find(storage.unsafeGetStorageImpl());
  return found == entries_.end() ? nullptr : found->second.find(storage, version);
}

void StorageTable::erase(const c10::StorageImpl* storage, const SavedStorage* saved) {
  const MutexLock lock(mutex_);
  const auto entry = entries_.find(storage);
  if (entry != entries_.end() && entry->second.identity == saved) {
    entries_.erase(entry);
  }
}

}  // namespace ebb
