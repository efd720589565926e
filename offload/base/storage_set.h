#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include <c10/core/Storage.h>

#include "streams/base/mutex.h"

namespace ebb {

// A set of storages that does not keep their bytes. Members are known by identity: the weak reference keeps the
// StorageImpl's own address from being used again, so a later storage is never taken for an earlier one.
//
// Note [Asking without the lock]
// Every save asks, so most answers come from a direct-mapped table: of the members whose addresses share an entry it
// has one, and 0 where there are none. Only an entry that has another member leads to the lock. Relaxed is enough: who
// asks holds the storage, and has heard by other means that it was inserted on another thread; and before an address
// can be another storage's its entry changes, then the weak reference ends, and only then is it freed and handed out
// again.
//
// Threads: every member may be called from any thread.
class StorageSet {
 public:
  void insert(const c10::Storage& storage);
  [[nodiscard]] bool contains(const c10::Storage& storage) const;

 private:
  using Identity = const c10::StorageImpl*;

  static constexpr std::size_t kEntries = 4096;
  [[nodiscard]] static std::size_t entry_of(Identity identity);

  void forget_the_dead() EBB_REQUIRES(mutex_);

  std::array<std::atomic<std::uintptr_t>, kEntries> entries_{};  // written under mutex_
  mutable SharedMutex mutex_;
  std::unordered_map<Identity, c10::weak_intrusive_ptr<c10::StorageImpl>> members_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 1024;
};

}  // namespace ebb
