#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "offload/tensors/saved_tensor.h"

namespace ebb {

// A hook of ebb's whose save a recipe may compute from.
class RecipeInputHook : public torch::autograd::SavedVariableHooks {
 public:
  // Another save of the tensor, as SavedTensor::for_recipe; null before the tensor has been packed.
  [[nodiscard]] virtual std::unique_ptr<SavedTensor> for_recipe() const = 0;
};

// Another save of the tensor that a node has saved in `variable`, a member of the node. Nothing is copied and no bytes
// are fetched. The node must be locked against other threads that make it let go of its saves. Null if
// - the node has saved nothing in `variable`, or has let go of the save,
// - the tensor has been written to, resized or given other data since its save,
// - the hook on the save is no RecipeInputHook,
// - LibTorch itself has the save, since nobody knows whether the tensor is still what was saved. (LibTorch shows a
// number to no hook, but a number does not change, so it gets a save.)
//
// Note [Foreign hooks are backward's to call]
// A hook of the program's may run a whole block of the model (torch's checkpoint), take the tensor out of a table, or
// count. So a hook is looked at and not called. SavedVariable::unpack would call the hook.
[[nodiscard]] std::unique_ptr<SavedTensor> recipe_input(const torch::autograd::SavedVariable& variable);

}  // namespace ebb
