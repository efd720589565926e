#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "offload/saved_storage.h"
#include "offload/version_check.h"

namespace ebb {

// A saved tensor as ebb holds it: the tensor itself, or, where its storage may leave the device, sizes, strides, offset
// and flags beside one use of that storage.
//
// Threads: as SavedStorage::Use.
class SavedTensor {
 public:
  // The tensor itself. It must not be one that the node which owns this save has made, unless detached: they would own
  // each other.
  SavedTensor(VersionCheck version, at::Tensor tensor);

  // The tensor without its bytes: `storage` has them.
  SavedTensor(VersionCheck version, const at::Tensor& tensor, std::shared_ptr<SavedStorage> storage);

  // One more save of the same tensor. Throws c10::Error in a forked child.
  SavedTensor(const SavedTensor& other);
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Exactly the tensor that was saved, ready for work on the calling thread's current stream.
  // Throws c10::Error if it has been written to since it was saved; else as SavedStorage::Use::get.
  [[nodiscard]] at::Tensor get();

  void check_unchanged() const { version_.check(tensor_); }

  // As `get`, but where the bytes may be elsewhere the tensor has none.
  [[nodiscard]] const at::Tensor& shape() const { return tensor_; }

  // Where the bytes are, if they may be elsewhere; else null.
  [[nodiscard]] SavedStorage* storage() const { return use_ ? use_->storage().get() : nullptr; }

  // How many recipes have to be run one inside the other to have the bytes.
  [[nodiscard]] int recipe_depth() const;

 private:
  const VersionCheck version_;
  const at::Tensor tensor_;
  std::optional<SavedStorage::Use> use_;
};

}  // namespace ebb
