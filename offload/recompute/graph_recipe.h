#pragma once

#include <memory>

#include <ATen/TensorGeometry.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/cache/recipe.h"
#include "offload/recompute/recipe_table.h"
#include "policy/policy.h"

namespace ebb {

// The recipe of a storage that an operation of the graph made: that operation, and saves of its inputs.
//
// Note [The graph is the recipe]
// The node that made a saved tensor has saved its own inputs for its own backward, so to drop the tensor costs no
// memory. The recipe has its own saves of these inputs (recipe_input.h), because a node lets go of its saves once it
// has run, and autograd may ask for the tensor after that, where backward covers other parts of the graph first. The
// inputs are on the device for as long as any of their uses is pending, and do not count in the window.
//
// A recipe makes the same bits, because it runs the same operation on the same bits with the same strides. The recipe
// runs without autocast, whose casts are in the node's saves already. Beyond what autograd asks of a program, a recipe
// asks the following:
// - A recipe's inputs must not be written to before the recipe's last use. Backward raises LibTorch's error for a
// write, also where plain autograd would not have checked the input: if weights are updated between two backward passes
// over one graph, for example. An input may be given other data (set_data): the recipe has the memory that was saved.
// If that memory is resized or swapped, as some shard parameters do, backward raises an error of ebb's.
// - A recipe's result must not be written to in ways that LibTorch does not count, such as `data()`, before or after
// its save. A tensor whose version has moved on has no recipe.
// - Settings that decide how an operation computes (TF32, determinism, the number of CPU threads, kernels that
// torch.library replaces) must be in backward as they were in forward.
// There are no recipes for operations that use random numbers, for tensors made on another stream than the stream that
// saves them, and for cuDNN's convolutions unless they are deterministic: cuDNN may choose another algorithm the second
// time.
class GraphRecipe final : public Recipe {
 public:
  // The recipe for the storage of `saved`, whose bytes must be as its operation left them; null if there is none, or
  // none within kMaxRecipeDepth.
  [[nodiscard]] static std::unique_ptr<GraphRecipe> find(const at::Tensor& saved);

  // `like`: sizes, strides and dtype of the tensor that fills the storage.
  GraphRecipe(Ingredients ingredients, const at::Tensor& like);

  [[nodiscard]] Recompute cost() const { return ingredients_.cost; }
  [[nodiscard]] const Ingredients::Inputs& inputs() const { return ingredients_.inputs; }

 private:
  [[nodiscard]] c10::Storage make() override;

  const Ingredients ingredients_;
  const at::TensorGeometry like_;
  const at::ScalarType dtype_;
};

}  // namespace ebb
