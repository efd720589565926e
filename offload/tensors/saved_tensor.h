#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "offload/steps/saved_storage.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/version_check.h"
#include "streams/base/mutex.h"

namespace ebb {

// A saved tensor as ebb holds it: the tensor itself, or, where its storage may leave the device, sizes, strides, offset
// and flags beside one use of that storage.
//
// Note [The very tensor]
// Without hooks a SavedVariable holds the tensor that was saved, unless the operation made it, and hands out that very
// one. What the program has done to it since that no version tells, such as set_data, is seen by backward. So where the
// program still has the tensor, and it is a leaf without gradient or has been given other data, it is what a use gets.
//
// Threads: as SavedStorage::Use.
class SavedTensor {
 public:
  // `saved` as it is. To be made while autograd saves it: what kind of save that is shows then only.
  explicit SavedTensor(const at::Tensor& saved);

  // `saved` without its bytes: `storage` has them.
  SavedTensor(const at::Tensor& saved, std::shared_ptr<SavedStorage> storage);

  // One more save of the same tensor, for a recipe: what was saved, whatever becomes of the tensor. Null if the tensor
  // has been resized or given other data since it was saved. Throws c10::Error if it has been written to, and in a
  // forked child.
  [[nodiscard]] std::unique_ptr<SavedTensor> for_recipe() const;

  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Exactly the tensor that was saved, ready for work on the calling thread's current stream, for an unpack hook to
  // return. Throws c10::Error if it has been written to since it was saved; else as SavedStorage::Use::get.
  [[nodiscard]] at::Tensor get();

  // The same for a recipe to compute from. Also throws c10::Error if the memory was resized or swapped.
  [[nodiscard]] at::Tensor get_for_recipe();

  // As `get`, but where the bytes may be elsewhere the tensor has none.
  [[nodiscard]] const at::Tensor& shape() const { return tensor_; }

  // Where the bytes are, if they may be elsewhere; else null.
  [[nodiscard]] SavedStorage* storage() const { return use_ ? use_->storage().get() : nullptr; }

  // How many recipes have to be run one inside the other to have the bytes.
  [[nodiscard]] int recipe_depth() const;

 private:
  SavedTensor(const SavedTensor& other, at::Tensor tensor);
  [[nodiscard]] bool has_its_memory() const;
  [[nodiscard]] LentFrom lent_from() const;
  [[nodiscard]] at::Tensor itself(c10::Storage storage);
  [[nodiscard]] bool has_other_data(const at::Tensor& saved) const;

  const VersionCheck version_;
  const Handing handing_;
  const WeakTensor base_;  // of a view, which a SavedVariable would hold: Note [Lent tensors]
  const at::Tensor tensor_;
  const void* const data_;   // of the tensor's memory at its save, if it is held as it is
  const std::size_t bytes_;  // as data_
  std::optional<SavedStorage::Use> use_;

  static inline Mutex handed_mutex_;  // of all saves; held over nothing
  WeakTensor handed_ EBB_GUARDED_BY(handed_mutex_){
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // as Handing::kItself
};

}  // namespace ebb
