#include "offload/storage_table.h"

namespace ebb {

void StorageTable::erase(const c10::StorageImpl* storage, const SavedStorage* saved) {
  const std::lock_guard lock(mutex_);
  const auto entry = entries_.find(storage);
  if (entry != entries_.end() && entry->second.identity == saved) {
    entries_.erase(entry);
  }
}

}  // namespace ebb
