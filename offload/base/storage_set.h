#pragma once

#include <array>
#include <atomic>
#include <bit>
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
  [[nodiscard]] bool contains(const c10::Storage& storage) const {
    const Identity identity = storage.unsafeGetStorageImpl();
    const std::uintptr_t entry = entries_[entry_of(identity)].load(std::memory_order_relaxed);
    return entry != 0 && (entry == address_of(identity) || is_member(identity));
  }

 private:
  using Identity = const c10::StorageImpl*;

  static constexpr std::size_t kEntries = 4096;
  [[nodiscard]] static std::uintptr_t address_of(Identity identity) {
    return reinterpret_cast<std::uintptr_t>(identity);
  }

  // The high bits of a product with 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, section 6.4).
  [[nodiscard]] static std::size_t entry_of(Identity identity) {
    constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15;
    constexpr int kBits = std::bit_width(kEntries - 1);
    return (address_of(identity) * kMultiplier) >> (64 - kBits);
  }
  [[nodiscard]] bool is_member(Identity identity) const;

  void forget_the_dead() EBB_REQUIRES(mutex_);

  std::array<std::atomic<std::uintptr_t>, kEntries> entries_{};  // written under mutex_
  mutable SharedMutex mutex_;
  std::unordered_map<Identity, c10::weak_intrusive_ptr<c10::StorageImpl>> members_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 1024;
};

}  // namespace ebb
