#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include <c10/core/Stream.h>

#include "streams/base/mutex.h"

namespace ebb {

// What may be copied out when the device is full.
//
// Threads: every member may be called from any thread.
class Evictee {
 public:
  virtual ~Evictee() = default;

  // Copies it out. `stream`: on which it was saved, and which is made to wait for the copy, so that the memory can be
  // let go at once. False, and nothing done, where somebody else uses the memory, or there is no room for the copy.
  // Throws what the tier throws that cannot start the copy. Waits for no lock under which device memory is asked for:
  // whoever calls this may hold the device allocator's.
  [[nodiscard]] virtual bool evict(c10::Stream stream) = 0;
};

// The storages that the policy keeps on the device and that may be copied out when the device is full, in the order of
// their saves: backward wants the first saved last.
//
// Threads: every member may be called from any thread. The lock is held over nothing but the table.
class Evictable {
 public:
  using Id = std::uint64_t;

  // `stream`: on which it was saved.
  [[nodiscard]] Id add(std::weak_ptr<Evictee> storage, c10::Stream stream);
  void remove(Id id) noexcept;

  // Copies out the first saved first, until it is enough. What cannot be copied out is passed over.
  void evict(const std::function<bool()>& enough);

 private:
  struct Entry {
    std::weak_ptr<Evictee> storage;
    c10::Stream stream;
  };

  Mutex mutex_;
  Id next_ EBB_GUARDED_BY(mutex_) = 0;
  std::map<Id, Entry> entries_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
