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

  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Exactly the tensor that was saved, ready for work on the calling thread's current stream, for an unpack hook to
  // return. Throws c10::Error if the tensor has been written to since it was saved, and what SavedStorage::Use::get
  // throws.
  [[nodiscard]] at::Tensor get();

  // The storage that has the bytes, if they may leave the device; else null.
  [[nodiscard]] std::shared_ptr<SavedStorage> shared_storage() const { return use_ ? use_->storage() : nullptr; }
  [[nodiscard]] SavedStorage* storage() const { return use_ ? use_->storage().get() : nullptr; }

 private:
  [[nodiscard]] at::Tensor whole(const at::Tensor& saved, const AutogradInfo& info) const;
  [[nodiscard]] LentFrom lent_from() const;
  [[nodiscard]] at::Tensor itself(c10::Storage storage);
  [[nodiscard]] bool has_other_data(const at::Tensor& saved) const;

  const VersionCheck version_;
  const Handing handing_;
  const WeakTensor base_;  // a view's base, which a SavedVariable would hold: Note [Lent tensors]
  const at::Tensor tensor_;
  std::optional<SavedStorage::Use> use_;

  static inline Mutex handed_mutex_;  // shared by all saves; no lock is taken under it
  WeakTensor handed_ EBB_GUARDED_BY(handed_mutex_){
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};  // handed out last as Handing::kItself
};

}  // namespace ebb
