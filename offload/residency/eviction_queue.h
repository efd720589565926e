#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include <c10/core/Stream.h>

#include "streams/base/mutex.h"

namespace ebb {

class Evictable;

// The storages that the policy keeps on the device and that may be copied out when the device is full, in the order of
// their saves: backward wants the first saved last.
//
// Threads: every member may be called from any thread. The lock is held over nothing but the table.
class EvictionQueue {
 public:
  using Id = std::uint64_t;

  // `stream`: the one that made the bytes.
  [[nodiscard]] Id add(std::weak_ptr<Evictable> storage, c10::Stream stream);
  void remove(Id id) noexcept;

  // Copies out the first saved first, until it is enough. What cannot be copied out is passed over.
  void evict(const std::function<bool()>& enough);

 private:
  struct Entry {
    std::weak_ptr<Evictable> storage;
    c10::Stream stream;
  };

  Mutex mutex_;
  Id next_ EBB_GUARDED_BY(mutex_) = 0;
  std::map<Id, Entry> entries_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
