#include "offload/residency/eviction_queue.h"

#include <optional>
#include <utility>

#include "offload/base/log.h"
#include "offload/residency/tiered_storage.h"

namespace ebb {

EvictionQueue::Id EvictionQueue::add(std::weak_ptr<TieredStorage> storage, c10::Stream stream) {
  const MutexLock lock(mutex_);
  entries_.emplace_hint(entries_.end(), next_, Entry{std::move(storage), stream});
  return next_++;
}

void EvictionQueue::remove(Id id) noexcept {
  const MutexLock lock(mutex_);
  entries_.erase(id);
}

void EvictionQueue::evict(const std::function<bool()>& enough) {
  for (Id next = 0; !enough();) {
    std::shared_ptr<TieredStorage> storage;
    std::optional<c10::Stream> stream;
    {
      const MutexLock lock(mutex_);
      for (auto entry = entries_.lower_bound(next); entry != entries_.end() && storage == nullptr; ++entry) {
        storage = entry->second.storage.lock();
        stream = entry->second.stream;
        next = entry->first + 1;
      }
    }
    if (storage == nullptr) {
      return;
    }
    try {
      static_cast<void>(storage->evict(*stream));
    } catch (...) {
      log_warning("a tensor that was kept could not be moved to make room on the device");
    }
  }
}

}  // namespace ebb
