#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/TensorGeometry.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "offload/saved_tensor.h"
#include "policy/policy.h"

namespace ebb {

// How to make a storage's bytes again: the operation that made them, and saves of what it computed from.
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
// - Settings that decide how an operation computes (TF32, determinism, the number of CPU threads) are in backward as
// they
//   were in forward.
// There are none for operations that use random numbers, for what another stream made than the one that saves it, and
// for cuDNN's convolutions unless they are deterministic: it may choose another algorithm the second time.
//
// Threads: `run` on one at a time.
class Recipe {
 public:
  using Inputs = std::vector<std::unique_ptr<SavedTensor>>;
  using Forward = std::function<at::Tensor(std::span<const at::Tensor>)>;

  // The recipe for the storage of `saved`, whose bytes must be as its operation left them; null if there is none, or
  // none within kMaxRecipeDepth.
  [[nodiscard]] static std::unique_ptr<Recipe> find(const at::Tensor& saved);

  // `like`: sizes, strides and dtype of the tensor that fills the storage.
  Recipe(Recompute cost, Inputs inputs, Forward forward, const at::Tensor& like);

  [[nodiscard]] Recompute cost() const { return cost_; }
  [[nodiscard]] int depth() const { return depth_; }

  // What it takes; null where it takes nothing in that place.
  [[nodiscard]] const Inputs& inputs() const { return inputs_; }

  // The bytes, made by work on the calling thread's current stream.
  // Throws what getting an input throws, and what the operation does, c10::OutOfMemoryError among it; it may then be
  // called again.
  [[nodiscard]] c10::Storage run();

  // Whether one runs on the calling thread.
  [[nodiscard]] static bool runs_here();

 private:
  const Recompute cost_;
  const Inputs inputs_;
  const Forward forward_;
  const at::TensorGeometry like_;
  const at::ScalarType dtype_;
  const int depth_;
};

}  // namespace ebb
