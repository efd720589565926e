#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "offload/steps/saved_storage.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/version_check.h"
#include "streams/base/mutex.h"

namespace ebb {

class AutogradInfo;

// A saved tensor as ebb holds it: the tensor itself, or, where its storage may leave the device, sizes, strides, offset
// and flags beside one use of that storage.
//
// Note [The very tensor]
// Without hooks a SavedVariable holds the very tensor that was saved, unless the operation made that tensor, and hands
// it out. Backward then sees what the program has done to the tensor without moving its version, such as set_data. So a
// use gets the very tensor where the program still has the tensor, and the tensor is a leaf without gradient or has
// been given other data.
//
// Threads: as SavedStorage::Use.
class SavedTensor {
 public:
  // Holds `saved` as it is or, with `storage`, without its bytes, which `storage` has. Must be made while autograd
  // saves the tensor: only then does the kind of save (Handing) show. `info`: of `saved`.
  SavedTensor(const at::Tensor& saved, const AutogradInfo& info, std::shared_ptr<SavedStorage> storage = nullptr);
  explicit SavedTensor(const at::Tensor& saved);

  // Another save of the tensor, for a recipe. This save has the memory that was saved, whatever becomes of the tensor.
  // Null if the tensor has been written to, resized or given other data since it was saved, and in a forked child.
  [[nodiscard]] std::unique_ptr<SavedTensor> for_recipe() const;

  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Exactly the tensor that was saved, ready for work on the calling thread's current stream, for an unpack hook to
  // return. Throws c10::Error if the tensor has been written to since it was saved, and what SavedStorage::Use::get
  // throws.
  [[nodiscard]] at::Tensor get();

  // The tensor that was saved, for a recipe to compute from. Throws what `get` throws, and c10::Error if the memory has
  // been resized or swapped.
  [[nodiscard]] at::Tensor get_for_recipe();

  // The tensor's sizes, strides, offset and flags. Where the storage may leave the device, the result has no bytes.
  [[nodiscard]] const at::Tensor& shape() const { return tensor_; }

  // The storage that has the bytes, if they may leave the device; else null.
  [[nodiscard]] SavedStorage* storage() const { return use_ ? use_->storage().get() : nullptr; }

  // Whether a leaf, or a view of a leaf, was saved, whose bytes the program holds.
  [[nodiscard]] bool is_of_leaf() const { return is_of_leaf_; }

  // How many recipes have to be run one inside the other to have the bytes.
  [[nodiscard]] int recipe_depth() const;

 private:
  SavedTensor(const SavedTensor& other, at::Tensor tensor);

  // Where a tensor's memory is, and its bytes; empty for a tensor whose sizes, strides or bytes are not numbers.
  using Memory = std::pair<const void*, std::size_t>;
  [[nodiscard]] static Memory memory_of(const at::Tensor& tensor);
  [[nodiscard]] at::Tensor whole(const at::Tensor& saved, const AutogradInfo& info) const;
  [[nodiscard]] bool has_its_memory() const;
  [[nodiscard]] LentFrom lent_from() const;
  [[nodiscard]] at::Tensor itself(c10::Storage storage);
  [[nodiscard]] bool has_other_data(const at::Tensor& saved) const;

  const VersionCheck version_;
  const Handing handing_;
  const bool is_of_leaf_ = false;
  const WeakTensor base_;  // a view's base, which a SavedVariable would hold: Note [Lent tensors]
  const at::Tensor tensor_;
  const Memory memory_;  // empty where a storage has the bytes
  std::optional<SavedStorage::Use> use_;

  static inline Mutex handed_mutex_;  // shared by all saves; no lock is taken under it
  WeakTensor handed_ EBB_GUARDED_BY(handed_mutex_){
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // handed out last as Handing::kItself
};

}  // namespace ebb
