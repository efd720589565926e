#include "offload/recompute/leaf_memory.h"

#include <vector>

#include "offload/base/managed_key.h"
#include "offload/recompute/graph_recipe.h"

namespace ebb {
namespace {

const void* address(c10::StorageImpl& storage) { return storage._mutable_data_ptr_no_checks().get(); }

}  // namespace

bool LeafMemory::stays(const GraphRecipe& recipe) {
  if (!may_be_sharded_) {
    return true;
  }
  bool all_stay = true;
  const MutexLock lock(mutex_);
  for (const auto& input : recipe.inputs()) {
    if (input == nullptr || !input->is_of_leaf() ||
        is_managed(input->shape())) {  // managed bytes come back by themselves
      continue;
    }
    const c10::Storage& storage = input->shape().storage();
    c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
    const auto known =
        leaves_.try_emplace(impl, Leaf{storage.getWeakStorageImpl(), address(*impl), impl->nbytes()}).first;
    all_stay = all_stay && known->second.found == Found::kStays;
  }
  return all_stay;
}

void LeafMemory::look() {
  if (!may_be_sharded_) {
    return;
  }
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> seen;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  seen.reserve(leaves_.size());
  for (auto leaf = leaves_.begin(); leaf != leaves_.end();) {
    const auto storage = leaf->second.storage.lock();
    if (!storage) {
      leaf = leaves_.erase(leaf);
      continue;
    }
    const bool stays = storage->nbytes() == leaf->second.bytes && address(*storage) == leaf->second.data;
    leaf->second.found = stays && leaf->second.found != Found::kGoes ? Found::kStays : Found::kGoes;
    seen.push_back(storage);
    ++leaf;
  }
}

}  // namespace ebb
