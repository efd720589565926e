#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable.h>

#include "offload/tensors/saved_tensor.h"

namespace ebb {

// Another save of what `node` has saved in `variable`, one of its members; null if it has saved nothing there, has let
// go of it, if it has been written to, resized or given other data since, or if the save is not ours: some other hook's
// (which is then unpacked for nothing), or LibTorch's own, of which nobody knows what it was when it was saved. (A
// number, which LibTorch shows no hook, is what it was.) Otherwise nothing is copied and no bytes are fetched. The node
// must be locked against others who make it let go.
//
// Note [Asking a node for its saves]
// A SavedVariable shows nobody its hooks, but unpacking calls them. So it is unpacked while this thread says that it is
// looking, and SaveHook then hands over another save instead of bytes.
[[nodiscard]] std::unique_ptr<SavedTensor> recipe_input(const torch::autograd::SavedVariable& variable,
                                                        const std::shared_ptr<torch::autograd::Node>& node);

// Whether the calling thread is inside recipe_input, whose result `saved` then is. Throws c10::Error if it has been
// written to.
[[nodiscard]] bool hand_to_recipe(const SavedTensor& saved);

// Throws if it is: for hooks that have nothing to hand over, and whose bytes would cost work.
void refuse_recipe();

}  // namespace ebb
