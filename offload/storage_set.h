#pragma once

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include <c10/core/Storage.h>

namespace ebb {

// A set of storages that does not keep their bytes. Members are known by identity: the weak reference keeps the
// StorageImpl's own address from being used again, so a later storage is never taken for an earlier one.
//
// Threads: every member may be called from any thread.
class StorageSet {
 public:
  void insert(const c10::Storage& storage);
  [[nodiscard]] bool contains(const c10::Storage& storage) const;

 private:
  void forget_the_dead();

  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> members_;  // LOCK: mutex_
  std::size_t next_cleaning_ = 1024;                                                                // LOCK: mutex_
};

}  // namespace ebb
