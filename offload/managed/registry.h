#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "offload/managed/managed_set.h"
#include "offload/managed/managed_storage.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

class PostponedWork;

// Which set manages a storage, and what is to be done before its next use. A storage is known by identity: the weak
// reference keeps the StorageImpl's own address from being used again.
//
// Note [A table of storages]
// An operation gets tensors that LibTorch has made, views and what autograd saves, and of all of them only the
// StorageImpl is the same object. A StorageImpl has no room for what ebb knows of it: its only metadata is an error's
// text, and the context of its memory is the allocator's. Of a TensorImpl the metadata (BackendMeta) is not inherited
// by views. So this is a table.
//
// Processes: a forked child has a registry of its own.
//
// Threads: every member may be called from any thread.
class Registry {
 public:
  enum class Stays : bool { kNo, kYes };
  enum class Added : std::uint8_t { kYes, kIsInUse, kNoRoom };

  struct Found {
    std::shared_ptr<ManagedSet> set;          // null where the storage is not known; outlives `managed`
    std::shared_ptr<ManagedStorage> managed;  // null where the storage stays on the device
    std::shared_ptr<PostponedWork> work;      // null where nothing is left to be done
    // Of a storage that stays and may get a home later: to be held while it is used.
    std::shared_ptr<const void> use_of_watched = nullptr;
  };

  static Registry& all() { return PerProcess<Registry>::here(); }

  [[nodiscard]] Found find(const c10::StorageImpl* storage);
  [[nodiscard]] Found find(const at::Tensor& tensor);  // nothing, where operations on the tensor are not observed

  // Another number as soon as what find() would say may have changed.
  [[nodiscard]] std::uint64_t changes() const { return changes_; }

  // In a forked child, of a storage that this registry does not know: throws c10::Error where the parent's does, or
  // cannot be asked.
  void refuse_parents(const c10::StorageImpl* storage);

  // All that come and go.
  [[nodiscard]] std::vector<Found> managed();

  // Has the set manage the storage, or with kYes only what belongs to it: the storage then stays where it is. A storage
  // that stayed so far may be given a home later; nothing else is changed by a second call. `slot`: as for
  // ManagedSet::add. Does nothing, and says why, where somebody uses a storage that is to get a home after all, and
  // where there is no room for its home. Throws c10::Error where another set manages the storage.
  [[nodiscard]] Added add(const c10::Storage& storage, const std::shared_ptr<ManagedSet>& set,
                          const ManagedSet::Slot& slot, Stays stays);

  // Notes a use of such a storage. The caller holds Found::use_of_watched.
  void used_on(const c10::StorageImpl* storage, c10::Stream stream);

  // Has the work done before the next use of any of these tensors' storages. Work that was left before is done first,
  // and throws. Returns false, and does nothing, unless all of the storages are known, and come and go.
  [[nodiscard]] bool postpone(at::TensorList tensors, const std::shared_ptr<PostponedWork>& work);

  // Notes that the storage is a state of `parameter`'s. Both are known.
  void belongs_to(const c10::StorageImpl* storage, const c10::Storage& parameter);

  // The set's storages of these tensors, and of the states of these, as far as they have not ended.
  [[nodiscard]] std::vector<c10::Storage> with_states_of(at::TensorList tensors, const ManagedSet& set);

  // Forgets a storage.
  void remove(const c10::StorageImpl* storage);

  // Lets go of what belongs to storages that have ended.
  void forget_the_dead();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::shared_ptr<ManagedSet> set;
    std::weak_ptr<ManagedStorage> managed{};   // empty where the storage stays on the device
    Gauge::Lease resident = {};                // of a storage that stays there within the set's bound
    std::shared_ptr<PostponedWork> work = {};  // before the next use; null: none
    std::shared_ptr<const void> watched = {};  // has a reference of each use; of a storage that may get a home later
    std::vector<c10::Stream> watched_on = {};  // the streams of these uses
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> parameter = {};  // whose state the storage is
  };

  // kNo: returns kNoRoom, too, where the set has no room for what would stay within its bound, and where the table has
  // become large.
  enum class LookedForDead : bool { kNo, kYes };
  [[nodiscard]] Added try_to_add(const c10::Storage& storage, const std::shared_ptr<ManagedSet>& set,
                                 const ManagedSet::Slot& slot, Stays stays, LookedForDead looked);

  const ProcessMark made_in_;
  Registry* const of_parent_ = PerProcess<Registry>::of_parent();
  std::atomic<std::uint64_t> changes_{0};
  SharedMutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_ EBB_GUARDED_BY(mutex_);
  std::size_t look_for_dead_at_ EBB_GUARDED_BY(mutex_) = 64;  // so many entries
};

}  // namespace ebb
