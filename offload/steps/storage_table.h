#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>

#include <c10/core/Storage.h>

#include "offload/base/version_id.h"
#include "streams/base/mutex.h"

namespace ebb {

class SavedStorage;

// Finds the SavedStorage of a storage that is already saved, so that one copy serves all its saves. An entry has the
// newest version of its storage. An entry cannot be taken for another storage's: a SavedStorage holds a weak reference
// to its StorageImpl, whose address is therefore not used again while the SavedStorage exists, and an entry that
// outlives its SavedStorage finds nothing.
//
// Threads: every member may be called from any thread.
class StorageTable {
 public:
  // Returns the storage's SavedStorage in this version, and false. If there is none, the result of `make()` is entered
  // and returned, and true. A storage whose memory was resized or swapped since counts as another storage, even where
  // the version has not changed. `make` runs under the table's lock.
  template <typename Make>
  std::pair<std::shared_ptr<SavedStorage>, bool> find_or_insert(const c10::Storage& storage, const VersionId& version,
                                                                Make make) {
    const MutexLock lock(mutex_);
    Entry& entry = entries_[storage.unsafeGetStorageImpl()];
    if (std::shared_ptr<SavedStorage> known = entry.find(storage, version)) {
      return {std::move(known), false};
    }
    std::shared_ptr<SavedStorage> made = make();
    entry = {made, made.get(), version, storage.data(), storage.nbytes()};
    return {std::move(made), true};
  }

  // The storage's SavedStorage in this version; null for none.
  [[nodiscard]] std::shared_ptr<SavedStorage> find(const c10::Storage& storage, const VersionId& version);

  // Called by the SavedStorage's destructor.
  void erase(const c10::StorageImpl* storage, const SavedStorage* saved);

 private:
  struct Entry {
    std::weak_ptr<SavedStorage> saved;
    const SavedStorage* identity = nullptr;  // still comparable when `saved` has expired
    VersionId version;
    const void* data = nullptr;
    std::size_t bytes = 0;

    [[nodiscard]] std::shared_ptr<SavedStorage> find(const c10::Storage& storage, const VersionId& of) const {
      return version == of && data == storage.data() && bytes == storage.nbytes() ? saved.lock() : nullptr;
    }
  };

  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
