#include "offload/managed/registry.h"

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>

#include "offload/base/managed_key.h"
#include "offload/managed/postponed_work.h"

namespace ebb {

Registry::Found Registry::find(const c10::StorageImpl* storage) {
  const SharedLock lock(mutex_);
  const auto known = entries_.find(storage);
  if (known == entries_.end()) {
    return {};
  }
  const Entry& entry = known->second;
  const bool has_work = entry.work != nullptr && !entry.work->is_over();
  return {entry.set, entry.managed.lock(), has_work ? entry.work : nullptr, entry.watched};
}

Registry::Found Registry::find(const at::Tensor& tensor) {
  const bool is_observed = tensor.defined() && is_managed(tensor) && tensor.has_storage();
  return is_observed ? find(tensor.storage().unsafeGetStorageImpl()) : Found();
}

void Registry::refuse_parents(const c10::StorageImpl* storage) {
  for (Registry* earlier = of_parent_; earlier != nullptr; earlier = earlier->of_parent_) {
    bool may_know = true;  // a mutex that cannot be had is one that another thread of the parent held
    if (earlier->mutex_.try_lock_shared()) {
      may_know = earlier->entries_.contains(storage);
      earlier->mutex_.unlock_shared();
    }
    if (may_know) {
      earlier->made_in_.check("this offloader");
    }
  }
}

std::vector<Registry::Found> Registry::managed() {
  std::vector<Found> all;
  const SharedLock lock(mutex_);
  for (const auto& [storage, entry] : entries_) {
    if (auto managed = entry.managed.lock()) {
      all.push_back({entry.set, std::move(managed), nullptr});
    }
  }
  return all;
}

Registry::Added Registry::add(const c10::Storage& storage, const std::shared_ptr<ManagedSet>& set,
                              const ManagedSet::Slot& slot, Stays stays) {
  const auto try_to_add = [&](LookedForDead looked) { return this->try_to_add(storage, set, slot, stays, looked); };
  Added added = try_to_add(LookedForDead::kNo);
  if (added == Added::kNoRoom) {  // storages that have ended, and works that nobody can see, may hold the room
    forget_the_dead();
    added = try_to_add(LookedForDead::kYes);
  }
  if (added == Added::kNoRoom) {
    set->drain();
    added = try_to_add(LookedForDead::kYes);
  }
  return added;
}

Registry::Added Registry::try_to_add(const c10::Storage& storage, const std::shared_ptr<ManagedSet>& set,
                                     const ManagedSet::Slot& slot, Stays stays, LookedForDead looked) {
  const MutexLock lock(mutex_);
  if (looked == LookedForDead::kNo && entries_.size() >= look_for_dead_at_) {
    return Added::kNoRoom;
  }
  Entry entry{storage.getWeakStorageImpl(), set};
  const auto known = entries_.find(storage.unsafeGetStorageImpl());
  if (known != entries_.end()) {
    TORCH_CHECK(
        known->second.set == set,
        "ebb: another offloader manages this storage already, or has done so until the offloader's end: a storage "
        "stays where it was managed first. New memory can be managed: parameter.data = "
        "parameter.detach().clone() (set_data in C++)");
    if (stays == Stays::kYes || known->second.resident || !known->second.managed.expired()) {
      return Added::kYes;
    }
    if (known->second.watched.use_count() > 1) {
      return Added::kIsInUse;
    }
    entry.watched_on = known->second.watched_on;
  }
  if (stays == Stays::kNo && slot == nullptr && set->may_keep(storage.nbytes())) {
    entry.resident = set->keep(storage.nbytes());
    if (!entry.resident && looked == LookedForDead::kNo) {
      return Added::kNoRoom;
    }
  }
  if (stays == Stays::kNo && !entry.resident) {
    const std::shared_ptr<ManagedStorage> managed = set->add(storage, slot, std::move(entry.watched_on));
    if (managed == nullptr) {
      return Added::kNoRoom;
    }
    entry.managed = managed;
  } else if (!entry.resident) {
    entry.watched = std::make_shared<char>();
  }
  entries_.insert_or_assign(storage.unsafeGetStorageImpl(), std::move(entry));
  ++changes_;
  return Added::kYes;
}

void Registry::used_on(const c10::StorageImpl* storage, c10::Stream stream) {
  const MutexLock lock(mutex_);
  const auto known = entries_.find(storage);
  if (known != entries_.end() &&
      std::ranges::find(known->second.watched_on, stream) == known->second.watched_on.end()) {
    known->second.watched_on.push_back(stream);
  }
}

bool Registry::postpone(at::TensorList tensors, const std::shared_ptr<PostponedWork>& work) {
  std::vector<std::shared_ptr<PostponedWork>> done;  // and the current stream is ordered behind them
  for (;;) {
    std::shared_ptr<PostponedWork> left;
    {
      const MutexLock lock(mutex_);
      std::vector<Entry*> entries;
      for (const at::Tensor& tensor : tensors) {
        const auto known = entries_.find(tensor.storage().unsafeGetStorageImpl());
        const std::shared_ptr<ManagedStorage> managed =
            known == entries_.end() ? nullptr : known->second.managed.lock();
        if (managed == nullptr || !managed->comes_and_goes()) {
          return false;
        }
        entries.push_back(&known->second);
        const std::shared_ptr<PostponedWork>& before = known->second.work;
        if (before != nullptr && !before->is_over() && std::ranges::find(done, before) == done.end()) {
          left = before;
        }
      }
      if (left == nullptr) {
        for (Entry* const entry : entries) {
          done.push_back(std::exchange(entry->work, work));  // is destroyed after the lock is released
        }
        ++changes_;
        return true;
      }
    }
    left->before_use();
    done.push_back(std::move(left));
  }
}

void Registry::belongs_to(const c10::StorageImpl* storage, const c10::Storage& parameter) {
  const MutexLock lock(mutex_);
  if (const auto known = entries_.find(storage); known != entries_.end()) {
    known->second.parameter = parameter.getWeakStorageImpl();
  }
}

std::vector<c10::Storage> Registry::with_states_of(at::TensorList tensors, const ManagedSet& set) {
  std::unordered_set<const c10::StorageImpl*> parameters;
  for (const at::Tensor& each : tensors) {
    parameters.insert(each.has_storage() ? each.storage().unsafeGetStorageImpl() : nullptr);
  }
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> known;
  {
    const SharedLock lock(mutex_);
    for (const auto& [address, entry] : entries_) {
      const bool is_state = entry.parameter && parameters.contains(entry.parameter->_unsafe_get_target());
      if (entry.set.get() == &set && (is_state || parameters.contains(address))) {
        known.push_back(entry.storage);
      }
    }
  }
  std::vector<c10::Storage> found;
  for (const auto& each : known) {  // not under the lock: Note [The interpreter's lock]
    if (auto storage = each.lock()) {
      found.emplace_back(std::move(storage));
    }
  }
  return found;
}

void Registry::remove(const c10::StorageImpl* storage) {
  std::optional<Entry> removed;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (const auto known = entries_.find(storage); known != entries_.end()) {
    removed = std::move(known->second);
    entries_.erase(known);
    ++changes_;
  }
}

void Registry::forget_the_dead() {
  std::set<std::shared_ptr<ManagedSet>> sets;
  {
    const SharedLock lock(mutex_);
    for (const auto& [storage, entry] : entries_) {
      sets.insert(entry.set);
    }
  }
  for (const std::shared_ptr<ManagedSet>& set : sets) {
    set->end_references();
  }
  for (bool is_again = true; is_again;) {  // what is dropped may have held more
    std::vector<Entry> dead;               // destroyed after the lock is released
    std::vector<std::shared_ptr<PostponedWork>> without_target;
    {
      const MutexLock lock(mutex_);
      for (auto entry = entries_.begin(); entry != entries_.end();) {
        if (const auto& work = entry->second.work; work != nullptr && work->has_lost_target()) {
          without_target.push_back(work);
        }
        if (entry->second.storage.expired()) {
          dead.push_back(std::move(entry->second));
          entry = entries_.erase(entry);
        } else {
          ++entry;
        }
      }
      look_for_dead_at_ = 2 * entries_.size() + 64;
    }
    is_again = false;
    for (const std::shared_ptr<PostponedWork>& work : without_target) {
      is_again = work->drop_if_unseen() || is_again;
    }
  }
  for (const std::shared_ptr<ManagedSet>& set : sets) {
    set->forget_the_dead();
  }
}

}  // namespace ebb
