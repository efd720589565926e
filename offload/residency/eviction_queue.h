#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include <c10/core/Stream.h>

#include "streams/base/mutex.h"

namespace ebb {

class TieredStorage;

// The storages that the policy has kept and that may be evicted when the device is full, in the order of their saves.
// Backward usually needs the first saved last.
//
// Threads: every member may be called from any thread. The lock is held over nothing but the table.
class EvictionQueue {
 public:
  using Id = std::uint64_t;

  // Adds a storage behind all others. `stream`: the stream that made the bytes.
  [[nodiscard]] Id add(std::weak_ptr<TieredStorage> storage, c10::Stream stream);
  void remove(Id id) noexcept;

  // Evicts the first saved first, until `enough` returns true. A storage that cannot be evicted is passed over.
  void evict(const std::function<bool()>& enough);

 private:
  struct Entry {
    std::weak_ptr<TieredStorage> storage;
    c10::Stream stream;
  };

  Mutex mutex_;
  Id next_ EBB_GUARDED_BY(mutex_) = 0;
  std::map<Id, Entry> entries_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
