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

}  // namespace ebb
