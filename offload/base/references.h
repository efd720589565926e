#pragma once

#include <cstddef>

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>

namespace ebb {

// How many references there are to a storage or tensor to which the caller has one. An object of Python's that only
// LibTorch still knows is not counted: LibTorch keeps the object for as long as there are other references.
//
// Threads: any; another thread may change the number meanwhile. Takes no lock.
[[nodiscard]] std::size_t references_to(const c10::Storage& of);
[[nodiscard]] std::size_t references_to(const at::TensorBase& of);
[[nodiscard]] std::size_t references_to(const c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>& of);

// Set while the calling thread holds the lock of LibTorch's device allocator. A thread that has the interpreter's lock
// may wait for the allocator's, so this thread must not wait for the interpreter's.
inline thread_local bool holds_allocators_lock = false;

// Whether this thread may make a reference to the storage, or end one, where there may be no other but Python's.
[[nodiscard]] inline bool may_refer_to(const c10::StorageImpl& storage) {
  return !holds_allocators_lock || storage.pyobj_slot()->load_pyobj() == nullptr;
}

}  // namespace ebb
