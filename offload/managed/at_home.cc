#include "offload/managed/at_home.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "offload/managed/postponed_work.h"

namespace ebb {
namespace {

bool can_be_used_at_home(const at::Tensor& tensor, const Registry::Found& found) {
  if (found.managed == nullptr || tensor.is_neg() || tensor.is_conj()) {
    return false;
  }
  found.set->residency().check_process();
  return found.set->residency().tier().blocks_are_memory() && found.managed->comes_and_goes();
}

}  // namespace

bool AtHome::is_possible(at::TensorList tensors) {
  return std::ranges::all_of(
      tensors, [](const at::Tensor& each) { return can_be_used_at_home(each, Registry::all().find(each)); });
}

std::shared_ptr<AtHome> AtHome::of(at::TensorList tensors) {
  std::vector<Registry::Found> found;
  for (const at::Tensor& each : tensors) {
    found.push_back(Registry::all().find(each));
    if (!can_be_used_at_home(each, found.back())) {
      return nullptr;
    }
  }
  for (const Registry::Found& each : found) {  // before any is used at home, which such work may wait for
    if (each.work != nullptr) {
      each.work->before_use();
    }
  }
  std::shared_ptr<AtHome> home(new AtHome);
  home->used_.reserve(found.size());  // what begins a use must find room
  for (std::size_t i = 0; i < found.size(); ++i) {
    void* const bytes = found[i].set->begin_use_at_home(found[i].managed);
    if (bytes == nullptr) {
      return nullptr;
    }
    home->used_.push_back(std::move(found[i]));
    const at::Tensor& tensor = tensors[i];
    const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
    home->tensors_.push_back(at::from_blob(static_cast<std::byte*>(bytes) + offset, tensor.sizes(), tensor.strides(),
                                           at::TensorOptions(tensor.scalar_type())));
  }
  return home;
}

AtHome::~AtHome() {
  for (const Registry::Found& each : used_) {
    each.managed->end_use_at_home();
  }
}

}  // namespace ebb
