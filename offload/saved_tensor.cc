#include "offload/saved_tensor.h"

#include <utility>

#include "offload/core.h"

namespace ebb {
namespace {

// A second tensor over `storage` with every other property of `tensor`: sizes, strides, offset, dtype, conjugate and
// negative bits, and the version counter that it shares with the original.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage) {
  const c10::TensorImpl& original = *tensor.unsafeGetTensorImpl();
  auto copy = original.shallow_copy_and_detach(original.version_counter(), /*allow_tensor_metadata_change=*/true);
  copy->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(std::move(copy));
}

}  // namespace

SavedTensor::SavedTensor(VersionCheck version, at::Tensor tensor)
    : version_(std::move(version)), tensor_(std::move(tensor)) {}

SavedTensor::SavedTensor(VersionCheck version, const at::Tensor& tensor, std::shared_ptr<SavedStorage> storage)
    : version_(std::move(version)),
      tensor_(with_storage(tensor, storage->no_bytes())),
      use_(std::in_place, std::move(storage)) {}

SavedTensor::SavedTensor(const SavedTensor& other) : version_(other.version_), tensor_(other.tensor_) {
  if (other.use_) {
    other.use_->storage()->check_process();
    use_.emplace(other.use_->storage());
  }
}

at::Tensor SavedTensor::get() {
  check_unchanged();
  return use_ ? with_storage(tensor_, use_->get()) : tensor_;
}

int SavedTensor::recipe_depth() const { return use_ ? use_->storage()->recipe_depth() : 0; }

}  // namespace ebb
