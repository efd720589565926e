#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace ebb {

// Remembers a tensor that somebody else may still hold: everything but the bytes, which are referred to weakly.
//
// Threads: the owner locks.
class RememberedTensor {
 public:
  // Remembers `tensor` for use on the calling thread's current stream, and forgets the tensor that was remembered
  // before. A tensor that is not one strided range of a storage is not remembered.
  void remember(const at::Tensor& tensor);

  // Another tensor over the remembered bytes. Undefined unless somebody still holds the bytes, nobody has written to
  // them, and the calling thread's current stream is the stream of `remember`.
  [[nodiscard]] at::Tensor recall() const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::optional<const void*> data;  // nullopt for a managed tensor, whose memory comes and goes
    std::size_t bytes;
    std::uint32_t version;
    c10::Stream stream;
  };

  at::Tensor shape_;  // without bytes
  std::optional<Memory> memory_;
};

// As Tensor::tensor_data(), but no dispatch mode of Python's sees the copy, which is no operation of the program's. A
// tensor of a Python class with dispatch of its own makes the copy itself.
[[nodiscard]] at::Tensor shallow_copy(const at::Tensor& tensor);

// A second tensor over `storage` with every other property of `tensor`: sizes, strides, offset, dtype, conjugate and
// negative bits, and the version counter, which both then share.
[[nodiscard]] at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage);

}  // namespace ebb
