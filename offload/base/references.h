#pragma once

#include <cstddef>

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

namespace ebb {

// Whether there is an object of Python's for the storage or tensor that only LibTorch still knows: LibTorch keeps the
// object, which counts as one reference, for as long as the storage or tensor has others.
template <typename Impl>
[[nodiscard]] bool has_idle_python_object(const Impl& of) {
  return of.pyobj_slot()->has_unique_reference();
}

// How many references there are to a storage or tensor to which the caller has one, without that of an idle object of
// Python's.
//
// Threads: any; another thread may change the number meanwhile.
template <typename Impl, typename Null>
[[nodiscard]] std::size_t references_to(const c10::intrusive_ptr<Impl, Null>& of) {
  return of.use_count() - (has_idle_python_object(*of) ? 1 : 0);
}
[[nodiscard]] inline std::size_t references_to(const c10::Storage& of) {
  return of.use_count() - (has_idle_python_object(*of.unsafeGetStorageImpl()) ? 1 : 0);
}
[[nodiscard]] inline std::size_t references_to(const at::TensorBase& of) {
  return of.use_count() - (has_idle_python_object(*of.unsafeGetTensorImpl()) ? 1 : 0);
}

}  // namespace ebb
