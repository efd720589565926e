#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/SmallVector.h>

#include "streams/base/process_mark.h"

namespace ebb {

class AutogradInfo;

// Note [Lent tensors]
// AccumulateGrad makes a gradient the leaf's `.grad` without a copy where nobody else refers to the tensor
// (`is_tensor_stealable` in torch/csrc/autograd/variable.h), whoever else uses the memory. Without hooks, a
// SavedVariable refers to the very tensor that it hands to backward, and so may the program: a backward that returns a
// saved tensor has it copied. With hooks, SavedVariable::unpack returns another tensor over the same memory, to which
// nobody refers, and AccumulateGrad would take over that tensor. A later write to the gradient (clipping, averaging,
// accumulation in place) would then write to the saved tensor, which other saves and the program may still use.
//
// So ebb refers to the tensor that LibTorch makes, as long as without hooks somebody else would refer to the very
// tensor that was saved: the program, or another save. A weak reference to the saved tensor shows both. LibTorch makes
// its tensor by TensorImpl::shallow_copy_and_detach, which is virtual: a lent tensor is of a class of ebb's, and
// remembers the copies made of it. ebb lets go of these copies when their node has run: at the end of their save, at
// the next node's unpack, where the device has no memory left, and when no backward pass is under way any more. Until
// then a node that lets go of what it got and asks for the save again finds the same bytes again.
//
// How LibTorch hands a saved tensor to backward, with hooks or without:
enum class Handing : std::uint8_t {
  kItself,  // a leaf that requires no gradient: backward gets the very tensor that the hook returns
  kCopied,  // an operation's own output: without hooks, too, backward gets a new tensor, which AccumulateGrad takes
            // over; but the SavedVariable has the memory, so LibTorch does not add gradients in place there
  kLent,    // every other save
};
[[nodiscard]] Handing handing_of(const AutogradInfo& saved);

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// The origin of a lent tensor: the save's address, only to compare, and the tensor that was saved. `is_view`: the saved
// tensor is a view. LibTorch's gradient would then be a view, too, and hold the base, so LibTorch never adds to its
// memory in place.
struct LentFrom {
  const void* save;
  WeakTensor saved;
  bool is_view = false;
};

// A tensor with all properties of `tensor`, and its version counter, over `storage`, for an unpack hook to return.
// Requires a dense tensor (TensorImpl itself).
[[nodiscard]] at::Tensor lend(const at::Tensor& tensor, c10::Storage storage, Handing handing, LentFrom from);

// A lent tensor over the storage of `tensor` itself. A `tensor` of another class than TensorImpl, or of a Python class
// that dispatches, is returned as it is.
[[nodiscard]] at::Tensor lend(const at::Tensor& tensor, Handing handing, LentFrom from);

// Has ebb refer to a tensor that an unpack hook returns as Handing::kItself, where that tensor is not the program's
// own.
void refer_to_lent(const at::Tensor& tensor, LentFrom from);

// Lets go of unused tensors that were lent on the calling thread to other nodes than the node that runs there now. To
// be called before the running node is lent anything, and at the end of each save. Each call looks at some of the
// tensors only, and the next call at others.
//
// `ending`: the save that ends, if one does. The call then lets go of what was lent from the save, too: LibTorch has a
// node's saves end while the node still counts as the one that runs, and a graph may end inside of another graph's
// node. Returns memory that only backward still uses. Without hooks LibTorch would now add gradients in place there;
// with hooks LibTorch does so once the caller has released the memory from the stash. Without `ending` returns nothing.
using Memories = c10::SmallVector<c10::Storage, 16>;
Memories sweep_lent(const void* ending = nullptr) noexcept;

// Frees the memory of lent tensors that nobody uses. A node that asks for such a tensor again gets other memory. The
// tensors live on, so that no graph ends in this call: the caller may hold the device allocator's lock. Each call frees
// some of the tensors only.
void free_unused_lent() noexcept;

// Lives during a backward pass. When no pass of the process is left, all lent tensors are let go of.
class LendingPass {
 public:
  LendingPass();
  ~LendingPass();
  LendingPass(const LendingPass&) = delete;
  LendingPass& operator=(const LendingPass&) = delete;

 private:
  const ProcessMark process_;
};

}  // namespace ebb
