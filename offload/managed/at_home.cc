#include "offload/managed/at_home.h"

#include <algorithm>
#include <cstddef>

#include <ATen/ops/from_blob.h>

#include "offload/base/managed_key.h"
#include "offload/managed/registry.h"

namespace ebb {

bool AtHome::is_possible(at::TensorList tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& each) {
    if (!is_managed(each) || !each.has_storage() || each.is_neg() || each.is_conj()) {
      return false;
    }
    const Registry::Found found = Registry::all().find(each.storage().unsafeGetStorageImpl());
    if (found.managed == nullptr) {
      return false;
    }
    found.set->residency().check_process();
    return found.set->residency().tier().blocks_are_memory() && found.managed->comes_and_goes();
  });
}

std::unique_ptr<AtHome> AtHome::of(at::TensorList tensors) {
  if (!is_possible(tensors)) {
    return nullptr;
  }
  for (const at::Tensor& each : tensors) {  // before any is used at home, which such work may wait for
    if (const auto work = Registry::all().find(each.storage().unsafeGetStorageImpl()).work) {
      work->before_use();
    }
  }
  std::unique_ptr<AtHome> home(new AtHome);
  home->sets_.reserve(tensors.size());  // what begins a use must find room
  home->used_.reserve(tensors.size());
  home->tensors_.reserve(tensors.size());
  const bool all = std::ranges::all_of(tensors, [&](const at::Tensor& each) { return home->add(each); });
  return all ? std::move(home) : nullptr;
}

AtHome::~AtHome() {
  for (const std::shared_ptr<ManagedStorage>& each : used_) {
    each->end_use_at_home();
  }
}

bool AtHome::add(const at::Tensor& tensor) {
  Registry::Found found = Registry::all().find(tensor.storage().unsafeGetStorageImpl());
  if (found.managed == nullptr) {
    return false;
  }
  void* const bytes = found.set->begin_use_at_home(found.managed);
  if (bytes == nullptr) {
    return false;
  }
  sets_.push_back(std::move(found.set));
  used_.push_back(std::move(found.managed));
  const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  tensors_.push_back(at::from_blob(static_cast<std::byte*>(bytes) + offset, tensor.sizes(), tensor.strides(),
                                   at::TensorOptions(tensor.scalar_type())));
  return true;
}

}  // namespace ebb
