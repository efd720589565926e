#include "offload/base/references.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

namespace ebb {
namespace {

template <typename Impl>
std::size_t count(std::size_t references, const Impl& of) {
  return references - (of.pyobj_slot()->has_unique_reference() ? 1 : 0);
}

}  // namespace

std::size_t references_to(const c10::Storage& of) { return count(of.use_count(), *of.unsafeGetStorageImpl()); }

std::size_t references_to(const at::TensorBase& of) { return count(of.use_count(), *of.unsafeGetTensorImpl()); }

std::size_t references_to(const c10::intrusive_ptr<c10::StorageImpl>& of) { return count(of.use_count(), *of); }

std::size_t references_to(const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& of) {
  return count(of.use_count(), *of);
}

}  // namespace ebb
