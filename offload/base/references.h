#pragma once

#include <cstddef>

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "offload/base/interpreter.h"

namespace ebb {

// `references` without that of a Python object that only LibTorch still knows. Not
// PyObjectSlot::has_unique_reference(), which takes the GIL. The object lives: with the caller's reference there are
// two to `of`, and LibTorch then has one to the object.
template <typename Impl>
[[nodiscard]] std::size_t without_idle_object(std::size_t references, const Impl& of) {
  const Interpreter* const interpreter = Interpreter::here;
  const auto* const object = of.pyobj_slot()->load_pyobj();
  return references - (interpreter != nullptr && object != nullptr && interpreter->references(object) == 1 ? 1 : 0);
}

// How many references there are to a storage or tensor to which the caller has one. An object of Python's that only
// LibTorch still knows is not counted: LibTorch keeps the object for as long as there are other references.
//
// Threads: any; another thread may change the number meanwhile. Takes no lock.
[[nodiscard]] inline std::size_t references_to(const c10::Storage& of) {
  return without_idle_object(of.use_count(), *of.unsafeGetStorageImpl());
}
[[nodiscard]] inline std::size_t references_to(
    const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& of) {
  return without_idle_object(of.use_count(), *of);
}
[[nodiscard]] inline std::size_t references_to(const at::TensorBase& of) { return references_to(of.getIntrusivePtr()); }

// Set while the calling thread holds the lock of LibTorch's device allocator. A thread that has the interpreter's lock
// may wait for the allocator's, so this thread must not wait for the interpreter's.
inline thread_local bool holds_allocators_lock = false;

// Whether this thread may make a reference to the storage, or end one, where there may be no other but Python's.
[[nodiscard]] inline bool may_refer_to(const c10::StorageImpl& storage) {
  return !holds_allocators_lock || storage.pyobj_slot()->load_pyobj() == nullptr;
}

}  // namespace ebb
