#include "offload/recompute/sharded_leaves.h"

#include "offload/recompute/log_recipe.h"

namespace ebb {

std::optional<bool> ShardedLeaves::may_compute(const LogRecipe& recipe) {
  if (!may_be_) {
    return true;
  }
  bool all_stay = true;
  bool all_are_known = true;
  const MutexLock lock(mutex_);
  for (const auto& root : recipe.roots()) {
    if (root->save != nullptr && root->save->is_of_leaf && !root->like.is_managed) {
      const c10::Storage& storage = root->storage;
      const auto known = leaves_.try_emplace(storage.unsafeGetStorageImpl(),
                                             Leaf{.storage = storage.getWeakStorageImpl(), .data = storage.data()});
      const std::optional<bool> stays = known.first->second.stays;
      all_stay = stays.value_or(true) && all_stay;
      all_are_known = stays.has_value() && all_are_known;
    }
  }
  return all_stay && !all_are_known ? std::nullopt : std::optional(all_stay);
}

void ShardedLeaves::guard_ended() noexcept {
  if (may_be_) {
    const MutexLock lock(mutex_);
    std::erase_if(leaves_, [](const auto& each) { return each.second.storage.expired(); });
    for (auto& [storage, leaf] : leaves_) {  // not made strong: Note [The interpreter's lock]
      leaf.stays = leaf.stays.value_or(true) && leaf.storage._unsafe_get_target()->data() == leaf.data;
    }
  }
}

}  // namespace ebb
