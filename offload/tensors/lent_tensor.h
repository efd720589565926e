#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/SmallVector.h>

namespace ebb {

// Note [Lent tensors]
// AccumulateGrad makes a gradient the leaf's `.grad` without a copy where nobody else refers to the tensor
// (`is_tensor_stealable` in torch/csrc/autograd/variable.h), whoever else uses the memory. Without hooks, a
// SavedVariable refers to the very tensor that it hands to backward, and so may the program: a backward that returns a
// saved tensor has it copied. With hooks, SavedVariable::unpack returns another tensor over the same memory, to which
// nobody refers; it would be taken over, and who then writes to the gradient (clipping, averaging, accumulation in
// place) writes to the saved tensor, which other saves and the program may still use.
//
// So ebb refers to the tensor that LibTorch makes, as long as without hooks somebody else would refer to the very
// tensor that was saved: the program does, or a save of it lives, which a weak reference to that tensor shows. LibTorch
// makes its own by TensorImpl::shallow_copy_and_detach, which is virtual: a lent tensor is of a class of ours, and
// remembers the copies made of it. They are let go of when their node has run: at the end of their save, at the next
// node's unpack, where the device has no memory left, and when no backward pass is under way any more. Until then a
// node that asks for a save again, having let go of what it got, finds that again.
//
// What LibTorch does with a save, hooks or none:
enum class Handing : std::uint8_t {
  kItself,  // a leaf that requires no gradient: what the hook returns is what backward gets
  kCopied,  // an operation's own output: backward gets a new tensor without hooks, too, which AccumulateGrad takes
            // over; but the SavedVariable has its memory, to which gradients that meet are then not added in place
  kLent,    // all else
};
[[nodiscard]] Handing handing_of(const at::Tensor& saved);

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What a tensor is lent from: the save's address, only to compare, and the tensor that was saved. Where that is a view,
// LibTorch's gradient would be one, too, and hold its base: its memory is never added to in place.
struct LentFrom {
  const void* save;
  const WeakTensor& saved;
  bool is_view = false;
};

// A tensor with all properties of `tensor`, and its version counter, over `storage`, for an unpack hook to return.
// Requires a dense tensor (TensorImpl itself).
[[nodiscard]] at::Tensor lend(const at::Tensor& tensor, c10::Storage storage, Handing handing, const LentFrom& from);

// The same over the tensor's own storage. A tensor of another class, or of a Python class that dispatches, is returned
// as it is.
[[nodiscard]] at::Tensor lend(const at::Tensor& tensor, Handing handing, const LentFrom& from);

// Refers to a tensor that an unpack hook returns as Handing::kItself, where that is not the program's own tensor.
void refer_to_lent(const at::Tensor& tensor, const LentFrom& from);

// Lets go of what is not used any more: of other nodes than the one that the calling thread runs, before that is lent
// anything. Looks at some of the tensors only, at others the next time.
void sweep_lent_behind() noexcept;

// The same, and of what was lent from `save`, where that ends: LibTorch has a node's saves end while the node still
// counts as the one that runs, and a graph may end inside of a node of another. Returns memory that only backward still
// uses. Without hooks LibTorch would now add gradients in place there; with hooks LibTorch does so once the
// caller has released the memory from the stash.
using Memories = c10::SmallVector<c10::Storage, 16>;
Memories sweep_lent_here(const void* save) noexcept;

// Whether any thread was lent anything that has not been let go of: if not, there is nothing to sweep.
[[nodiscard]] bool anything_is_lent() noexcept;

// Frees the memory of lent tensors that nobody uses, whichever node may still ask for them again: it gets other memory
// then. The tensors live on, so that no graph ends here: the caller may hold the device allocator's lock. Looks at some
// of the tensors only.
void free_unused_lent() noexcept;

class Lent;

// Lives during a backward pass.
class LendingPass {
 public:
  LendingPass();
  ~LendingPass();
  LendingPass(const LendingPass&) = delete;
  LendingPass& operator=(const LendingPass&) = delete;

 private:
  Lent& lent_;
};

}  // namespace ebb
