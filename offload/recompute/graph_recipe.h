#pragma once

#include <cstddef>
#include <memory>

#include <ATen/TensorGeometry.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/recompute/ingredients.h"
#include "offload/residency/recipe.h"
#include "policy/policy.h"

namespace ebb {

// A storage's recipe that its graph has: the operation that made them, and saves of what it computed from.
//
// Note [The graph is the recipe]
// The node that made a saved tensor has saved its own inputs for its own backward, so that to drop the tensor costs no
// memory. The recipe has saves of its own of these inputs (recipe_input.h): a node lets go of its saves once it has
// run, and autograd may ask for the tensor after that, where backward covers other parts of the graph first. The inputs
// are on the device for as long as any of their uses is pending, and take no room in the window.
//
// A recipe makes the same bits: it runs the same operation on the same bits, strides included, without autocast, which
// has had its say in what the node saved. What that asks of a program, beyond what autograd does:
// - What a recipe takes must not be written to before its last use. Backward then raises LibTorch's error for it, also
//   where plain autograd would not have looked there: if weights are updated between two backward passes over one
//   graph. It may be given other data (set_data): the recipe has the memory that was saved. If that memory is resized
//   or swapped, as some shard parameters do, backward raises an error of ours.
// - What a recipe makes must not be written to in ways that LibTorch does not count, such as `data()`, before or after
//   it is saved. A tensor whose version has moved on has no recipe.
// - Settings that decide how an operation computes (TF32, determinism, the number of CPU threads) are in
//   backward as they were in forward.
// There are none for operations that use random numbers, for what another stream made than the one that saves it, and
// for cuDNN's convolutions unless they are deterministic: it may choose another algorithm the second time.
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
