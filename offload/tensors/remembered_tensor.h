#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

namespace ebb {

// A tensor that somebody else may still hold, or not: all of it but its bytes, which are referred to weakly.
//
// Threads: the owner locks.
class RememberedTensor {
 public:
  // As the calling thread's current stream may use it. Forgets what was remembered before. A tensor that is not one
  // strided range of a storage is not remembered.
  void remember(const at::Tensor& tensor);

  // Another tensor over the same bytes, if somebody holds them, unwritten, for work on the stream that may use them;
  // else undefined.
  [[nodiscard]] at::Tensor recall() const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::size_t bytes;
    std::uint32_t version;
    c10::Stream stream;
  };

  at::Tensor shape_;  // without bytes
  std::optional<Memory> memory_;
};

// A second tensor over `storage` with every other property of `tensor`: sizes, strides, offset, dtype, conjugate and
// negative bits, and the version counter that it shares with the original.
[[nodiscard]] at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage);

}  // namespace ebb
