#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable.h>

#include "offload/base/libtorch.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {

// Another save of the tensor that `node` has saved in `variable`, a member of the node. Nothing is copied and no bytes
// are fetched. The node must be locked against other threads that make it let go of its saves. Null if
// - the node has saved nothing in `variable`, or has let go of the save,
// - the tensor has been written to, resized or given other data since its save,
// - a hook that is not ebb's has the save (that hook is then unpacked for nothing),
// - LibTorch itself has the save, since nobody knows whether the tensor is still what was saved. (LibTorch shows a
// number to no hook, but a number does not change, so it gets a save.)
//
// Note [Asking a node for its saves]
// A SavedVariable shows nobody its hooks, but its unpack calls them. So recipe_input marks the calling thread as
// looking for a recipe's input and unpacks the variable; Packed::unpack then hands over another save instead of bytes.
[[nodiscard]] std::unique_ptr<SavedTensor> recipe_input(const torch::autograd::SavedVariable& variable,
                                                        const NodePtr& node);

// Inside recipe_input on the calling thread, makes another save of `saved` its result and returns true; otherwise
// returns false. Throws c10::Error if the tensor has been written to.
[[nodiscard]] bool hand_to_recipe(const SavedTensor& saved);

// Throws inside recipe_input on the calling thread: for hooks that have no save to hand over, and whose unpack would
// cost work.
void refuse_recipe();

}  // namespace ebb
