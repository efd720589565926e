#include "offload/tensors/saved_tensor.h"

#include <utility>

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "offload/base/autograd_info.h"
#include "offload/cache/residency.h"
#include "offload/tensors/remembered_tensor.h"

namespace ebb {
namespace {

// Whether the tensor is a view of a leaf that another node made than the node that saves it. Such a view is kept whole,
// as LibTorch keeps it: after a write the view alone knows which node made what it now shows (VersionCheck). A view
// that the saving node made is not kept whole, because the two would own each other. The saving node is the thread's
// newest node, except for a custom function's, whose forward may have made other nodes since.
bool is_view_of_leaf_from_before(const at::Tensor& tensor, const AutogradInfo& info) {
  if (!info.is_view() || !AutogradInfo(tensor._base()).is_leaf()) {
    return false;
  }
  const auto& made_by = info.grad_fn();
  return made_by != nullptr && !is_custom(*made_by) && made_by->sequence_nr() + 1 < at::sequence_number::peek();
}

// The base that a SavedVariable would hold, because it would hold the view; else null.
WeakTensor base_of(const at::Tensor& saved, const AutogradInfo& info, Handing handing) {
  const bool holds_view = handing != Handing::kCopied && info.is_view();
  return WeakTensor((holds_view ? saved._base() : at::Tensor()).getIntrusivePtr());
}

// Whether sizes, strides and bytes are numbers: a tracer's are symbols, and a nested tensor has none of its own.
bool has_numbers(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.storage().sym_nbytes().maybe_as_int().has_value();
}

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& saved) : SavedTensor(saved, AutogradInfo(saved)) {}

SavedTensor::SavedTensor(const at::Tensor& saved, const AutogradInfo& info, std::shared_ptr<SavedStorage> storage)
    : version_(saved, info),
      handing_(handing_of(info)),
      base_(base_of(saved, info, handing_)),
      tensor_(storage == nullptr ? whole(saved, info) : with_storage(saved, storage->residency()->no_bytes())) {
  if (storage != nullptr) {
    use_.emplace(std::move(storage));
  }
}

// The tensor to hold, detached from its history unless it is a leaf: an operation that saves its own output would own
// itself for ever. Called when the members before tensor_ are set.
at::Tensor SavedTensor::whole(const at::Tensor& saved, const AutogradInfo& info) const {
  if (info.is_leaf() || is_view_of_leaf_from_before(saved, info)) {
    return saved;
  }
  const at::Tensor lent = handing_ == Handing::kLent ? lend(saved, handing_, lent_from()) : saved;
  return lent.is_same(saved) ? shallow_copy(saved) : lent;
}

at::Tensor SavedTensor::get() {
  version_.check(tensor_);
  const at::Tensor saved = version_.saved();
  if (handing_ == Handing::kLent && saved.defined() && has_other_data(saved)) {
    return lend(saved, handing_, lent_from());
  }
  if (!use_) {
    const bool whole = tensor_.unsafeGetTensorImpl()->autograd_meta() != nullptr;
    return handing_ == Handing::kLent && whole ? lend(tensor_, handing_, lent_from()) : tensor_;
  }
  c10::Storage storage = use_->get();
  if (handing_ == Handing::kItself) {
    return saved.defined() ? saved : itself(std::move(storage));
  }
  return lend(tensor_, std::move(storage), handing_, lent_from());
}

LentFrom SavedTensor::lent_from() const { return {this, version_.weak(), base_.weak_use_count() != 0}; }

// The tensor to hand out in place of a saved tensor that the program no longer has. A tensor that was handed out before
// and still lives over this storage is handed out again: without hooks there is only one tensor, which the program may
// have kept as a gradient and may ask for once more.
at::Tensor SavedTensor::itself(c10::Storage storage) {
  at::Tensor lent = with_storage(tensor_, storage);
  at::Tensor known;  // destroyed after the lock is released
  {
    const MutexLock lock(handed_mutex_);
    known = at::Tensor(handed_.lock());
    if (known.defined() && known.has_storage() &&
        known.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
      return known;
    }
    handed_ = WeakTensor(lent.getIntrusivePtr());
  }
  refer_to_lent(lent, lent_from());
  return lent;
}

bool SavedTensor::has_other_data(const at::Tensor& saved) const {
  if (tensor_.is_same(saved) || !has_numbers(saved) || !has_numbers(tensor_)) {
    return false;
  }
  return saved.storage().unsafeGetStorageImpl() !=
             (use_ ? use_->storage()->source().identity() : tensor_.storage().unsafeGetStorageImpl()) ||
         saved.sizes() != tensor_.sizes() || saved.strides() != tensor_.strides() ||
         saved.storage_offset() != tensor_.storage_offset();
}

}  // namespace ebb
