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
// Every save asks, so most answers come from a direct-mapped table. An entry of the table has the address of one of the
// members that share the entry, and 0 if no member does. Only an entry with another member's address leads to the lock.
// Relaxed ordering is enough. The thread that asks holds the storage, and has learned of an insertion on another thread
// through the program's own synchronization. And an address cannot become another storage's while its entry has it: the
// entry changes first, then the weak reference ends, and only then is the address freed.
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
