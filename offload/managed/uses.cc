#include "offload/managed/uses.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "offload/base/managed_key.h"
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

struct AtHome {
  AtHome() = default;
  ~AtHome() {
    for (const Registry::Found& each : used) {
      each.managed->end_use_at_home();
    }
  }
  AtHome(const AtHome&) = delete;
  AtHome& operator=(const AtHome&) = delete;

  std::vector<Registry::Found> used;
  std::vector<at::Tensor> tensors;
};

}  // namespace

Uses::Uses(at::TensorList read, at::TensorList written) : Uses(Outer::kMayServe) {  // and so ends where this throws
  for (const at::Tensor& tensor : written) {
    add(tensor, /*written=*/true);
  }
  for (const at::Tensor& tensor : read) {
    add(tensor, /*written=*/false);
  }
  bring();
}

void Uses::end() {
  for (OfSet& each : sets_) {
    each.set->end({each.uses.data(), each.uses.size()});
  }
  for (OfSet& each : sets_) {
    if (each.has_more_to_prefetch) {
      each.set->prefetch();
    }
  }
}

void Uses::add(const at::Tensor& tensor, bool written) {
  if (!tensor.defined() || !is_managed(tensor) || !tensor.has_storage()) {
    return;
  }
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (ManagedSet::Use* const known = use_of(storage)) {
    known->written = known->written || written;
    return;
  }
  Registry::Found found = Registry::all().find(storage);
  if (found.set == nullptr) {
    Registry::all().refuse_parents(storage);
    return;
  }
  const c10::Stream stream = found.set->residency().tier().current_stream();
  if (found.managed == nullptr) {
    if (found.use_of_watched != nullptr) {
      Registry::all().used_on(storage, stream);
      watched_.push_back(std::move(found.use_of_watched));
    }
    return;
  }
  found.set->residency().check_process();
  if (found.work != nullptr) {
    found.work->before_use();
  }
  auto of_set = std::ranges::find(sets_, found.set, &OfSet::set);
  if (of_set == sets_.end()) {
    sets_.push_back({std::move(found.set), stream, {}});
    of_set = std::prev(sets_.end());
  }
  places_.emplace(storage, Place{static_cast<std::size_t>(of_set - sets_.begin()), of_set->uses.size()});
  of_set->uses.push_back({found.managed, written});
  found.managed->begin_use();
}

void Uses::add(const c10::IValue& value, bool written) {
  if (value.isTensor()) {
    add(value.toTensor(), written);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      add(each, written);
    }
  }
}

void Uses::add_all(c10::ArrayRef<c10::IValue> arguments, const OperatorTraits& traits) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    add(arguments[i], traits.may_write_to(i));
  }
}

void Uses::bring() {
  for (OfSet& each : sets_) {
    each.has_more_to_prefetch = each.set->bring({each.uses.data(), each.uses.size()}, each.stream);
  }
  around_ = std::exchange(innermost_, this);
}

bool Uses::are_on_a_cpu() const {
  return std::ranges::any_of(sets_, [](const OfSet& each) { return each.stream.device().is_cpu(); });
}

// This operation's or, where that serves as well, one's that this operation is inside of. Null for none.
ManagedSet::Use* Uses::use_of(const c10::StorageImpl* storage) {
  if (const auto place = places_.find(storage); place != places_.end()) {
    return &sets_[place->second.set].uses[place->second.use];
  }
  for (Uses* each = outer_ == Outer::kMayServe ? innermost_ : nullptr; each != nullptr; each = each->around_) {
    if (const auto place = each->places_.find(storage); place != each->places_.end()) {
      OfSet& of_set = each->sets_[place->second.set];
      const bool serves = of_set.stream == of_set.set->residency().tier().current_stream() &&
                          each->registry_changes_ == Registry::all().changes();
      return serves ? &of_set.uses[place->second.use] : nullptr;
    }
  }
  return nullptr;
}

bool can_be_used_at_home(at::TensorList tensors) {
  return std::ranges::all_of(
      tensors, [](const at::Tensor& each) { return can_be_used_at_home(each, Registry::all().find(each)); });
}

std::shared_ptr<const std::vector<at::Tensor>> use_at_home(at::TensorList tensors) {
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
  for (const Registry::Found& each : found) {  // all copies begin before one is waited for
    each.set->send_home(each.managed);
  }
  const auto home = std::make_shared<AtHome>();
  home->used.reserve(found.size());  // what begins a use must find room
  for (std::size_t i = 0; i < found.size(); ++i) {
    void* const bytes = found[i].set->begin_use_at_home(found[i].managed);
    if (bytes == nullptr) {
      return nullptr;
    }
    home->used.push_back(std::move(found[i]));
    const at::Tensor& tensor = tensors[i];
    const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
    home->tensors.push_back(at::from_blob(static_cast<std::byte*>(bytes) + offset, tensor.sizes(), tensor.strides(),
                                          at::TensorOptions(tensor.scalar_type())));
  }
  return {home, &home->tensors};
}

}  // namespace ebb
