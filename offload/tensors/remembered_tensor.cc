#include "offload/tensors/remembered_tensor.h"

#include <typeinfo>
#include <utility>

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "offload/base/managed_key.h"

namespace ebb {
namespace {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

void RememberedTensor::remember(const at::Tensor& tensor) {
  memory_.reset();
  shape_.reset();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (typeid(impl) != typeid(c10::TensorImpl) || !tensor.has_storage()) {
    return;
  }
  const c10::Storage& storage = tensor.storage();
  const auto data = is_managed(tensor) ? std::nullopt : std::optional(storage.data());
  memory_.emplace(Memory{storage.getWeakStorageImpl(), data, storage.nbytes(), impl.version_counter().current_version(),
                         current_stream(tensor.device())});
  const c10::Storage no_bytes(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tensor.device()));
  shape_ = with_storage(tensor, no_bytes);
}

at::Tensor RememberedTensor::recall() const {
  if (!memory_ || shape_.unsafeGetTensorImpl()->version_counter().current_version() != memory_->version ||
      memory_->stream != current_stream(memory_->stream.device())) {
    return {};
  }
  c10::intrusive_ptr<c10::StorageImpl> storage = memory_->storage.lock();
  if (!storage || (memory_->data && storage->data() != *memory_->data) || storage->nbytes() != memory_->bytes) {
    return {};
  }
  return with_storage(shape_, c10::Storage(std::move(storage)));
}

at::Tensor shallow_copy(const at::Tensor& tensor) {
  std::optional<c10::impl::ExcludeDispatchKeyGuard> unseen;
  if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    unseen.emplace(c10::DispatchKey::Python);
  }
  return tensor.tensor_data();
}

// Does not call the virtual function, which for a lent tensor notes the copy as lent.
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);  // by dispatch modes
  const c10::TensorImpl& original = *tensor.unsafeGetTensorImpl();
  auto copy = original.c10::TensorImpl::shallow_copy_and_detach(original.version_counter(),
                                                                /*allow_tensor_metadata_change=*/true);
  copy->set_storage_keep_dtype(std::move(storage));
  return at::Tensor(std::move(copy));
}

}  // namespace ebb
