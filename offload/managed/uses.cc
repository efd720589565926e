#include "offload/managed/uses.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "offload/base/managed_key.h"
#include "offload/managed/postponed_work.h"

namespace ebb {

Uses::~Uses() {
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
    if (found.watched != nullptr) {
      found.watched->used_on(stream);
      watched_.push_back(std::move(found.watched));
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
  places_.push_back({storage, static_cast<std::size_t>(of_set - sets_.begin()), of_set->uses.size()});
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
}

bool Uses::are_on_a_cpu() const {
  return std::ranges::any_of(sets_, [](const OfSet& each) { return each.stream.device().is_cpu(); });
}

// Null where there is none so far.
const Uses::Place* Uses::find(const c10::StorageImpl* storage) {
  constexpr std::size_t kFew = 16;
  if (places_.size() <= kFew) {
    const auto place = std::ranges::find(places_, storage, &Place::storage);
    return place == places_.end() ? nullptr : place;
  }
  while (many_.size() < places_.size()) {
    many_.emplace(places_[many_.size()].storage, many_.size());
  }
  const auto known = many_.find(storage);
  return known == many_.end() ? nullptr : &places_[known->second];
}

// This operation's or, where that serves as well, one's that this operation is inside of. Null for none.
ManagedSet::Use* Uses::use_of(const c10::StorageImpl* storage) {
  if (const Place* const place = find(storage)) {
    return &sets_[place->set].uses[place->use];
  }
  for (const Scope* scope = outer_ == Outer::kMayServe ? Scope::innermost_ : nullptr; scope != nullptr;
       scope = scope->outer_) {
    if (const Place* const place = scope->uses_.find(storage)) {
      OfSet& of_set = scope->uses_.sets_[place->set];
      const bool serves = of_set.stream == of_set.set->residency().tier().current_stream() &&
                          scope->uses_.registry_changes_ == Registry::all().changes();
      return serves ? &of_set.uses[place->use] : nullptr;
    }
  }
  return nullptr;
}

Uses::Scope::Scope(Uses& uses) : uses_(uses), outer_(innermost_) { innermost_ = this; }

Uses::Scope::~Scope() {
  Scope** link = &innermost_;  // to this one
  while (*link != this) {
    link = &(*link)->outer_;
  }
  *link = outer_;
}

OnDevice::OnDevice(at::TensorList read, at::TensorList written) {
  for (const at::Tensor& tensor : written) {
    uses_.add(tensor, /*written=*/true);
  }
  for (const at::Tensor& tensor : read) {
    uses_.add(tensor, /*written=*/false);
  }
  uses_.bring();
  scope_.emplace(uses_);
}

}  // namespace ebb
