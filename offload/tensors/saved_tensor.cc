#include "offload/tensors/saved_tensor.h"

#include <cstring>
#include <typeinfo>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "offload/tensors/remembered_tensor.h"

namespace ebb {
namespace {

// Whether the node is that of a torch::autograd::Function.
bool is_custom(const torch::autograd::Node& node) { return std::strstr(typeid(node).name(), "CppNode") != nullptr; }

// Whether the tensor is a view of a leaf that another node made than the node that saves it. Such a view is kept whole,
// as LibTorch keeps it: after a write the view alone knows which node made what it now shows (VersionCheck). A view
// that the saving node made is not kept whole, because the two would own each other. The saving node is the thread's
// newest node, except for a custom function's, whose forward may have made other nodes since.
bool is_view_of_leaf_from_before(const at::Tensor& tensor) {
  return tensor.is_view() && tensor._base().is_leaf() && tensor.grad_fn() != nullptr && !is_custom(*tensor.grad_fn()) &&
         tensor.grad_fn()->sequence_nr() + 1 < at::sequence_number::peek();
}

// The tensor to hold, detached from its history unless it is a leaf: an operation that saves its own output would own
// itself for ever.
at::Tensor held(const at::Tensor& tensor, Handing handing, const LentFrom& from) {
  if (tensor.is_leaf() || is_view_of_leaf_from_before(tensor)) {
    return tensor;
  }
  const at::Tensor lent = handing == Handing::kLent ? lend(tensor, handing, from) : tensor;
  return lent.is_same(tensor) ? tensor.tensor_data() : lent;
}

// Whether a SavedVariable would hold the tensor's base, because it would hold the view.
bool holds_base(const at::Tensor& saved, Handing handing) { return handing != Handing::kCopied && saved.is_view(); }

WeakTensor base_of(const at::Tensor& saved, Handing handing) {
  return WeakTensor(holds_base(saved, handing) ? saved._base().getIntrusivePtr()
                                               : c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
}

// Whether sizes, strides and bytes are numbers: a tracer's are symbols, and a nested tensor has none of its own.
bool has_numbers(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.storage().sym_nbytes().maybe_as_int().has_value();
}

const void* memory_of(const at::Tensor& tensor) { return has_numbers(tensor) ? tensor.storage().data() : nullptr; }

std::size_t bytes_of(const at::Tensor& tensor) { return has_numbers(tensor) ? tensor.storage().nbytes() : 0; }

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& saved)
    : version_(saved),
      handing_(handing_of(saved)),
      base_(base_of(saved, handing_)),
      tensor_(held(saved, handing_, {this, version_.weak(), holds_base(saved, handing_)})),
      data_(memory_of(saved)),
      bytes_(bytes_of(saved)) {}

SavedTensor::SavedTensor(const at::Tensor& saved, std::shared_ptr<SavedStorage> storage)
    : version_(saved),
      handing_(handing_of(saved)),
      base_(base_of(saved, handing_)),
      tensor_(with_storage(saved, storage->no_bytes())),
      data_(nullptr),
      bytes_(0),
      use_(std::in_place, std::move(storage)) {}

SavedTensor::SavedTensor(const SavedTensor& other, at::Tensor tensor)
    : version_(other.version_),
      handing_(other.handing_),
      base_(other.base_),
      tensor_(std::move(tensor)),
      data_(other.data_),
      bytes_(other.bytes_) {}

std::unique_ptr<SavedTensor> SavedTensor::for_recipe() const {
  version_.check(tensor_);
  if (!has_its_memory()) {
    return nullptr;
  }
  std::unique_ptr<SavedTensor> copy(new SavedTensor(*this, use_ ? tensor_ : tensor_.tensor_data()));
  if (use_) {
    use_->storage()->check_process();
    copy->use_.emplace(use_->storage());
  }
  return copy;
}

bool SavedTensor::has_its_memory() const {
  return use_ ? !use_->storage()->source_has_changed() : memory_of(tensor_) == data_ && bytes_of(tensor_) == bytes_;
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
    if (saved.defined()) {
      return saved;
    }
    return itself(std::move(storage));
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
             (use_ ? use_->storage()->source_identity() : tensor_.storage().unsafeGetStorageImpl()) ||
         saved.sizes() != tensor_.sizes() || saved.strides() != tensor_.strides() ||
         saved.storage_offset() != tensor_.storage_offset();
}

at::Tensor SavedTensor::get_for_recipe() {
  version_.check(tensor_);
  TORCH_CHECK(has_its_memory(),
              "ebb: a saved tensor is to be recomputed, but the memory of a tensor that it was computed from has been "
              "resized or replaced since. Have the policy keep or offload what is computed from such tensors.");
  return use_ ? with_storage(tensor_, use_->get()) : tensor_;
}

int SavedTensor::recipe_depth() const { return use_ ? use_->storage()->recipe_depth() : 0; }

}  // namespace ebb
