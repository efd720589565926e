#pragma once

#include <memory>
#include <optional>

#include <torch/csrc/autograd/function.h>

#include "offload/recipe.h"

namespace ebb {

// What a node's output 0 can be computed from.
struct Ingredients {
  Recompute cost = Recompute::kNo;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of the output
  Recipe::Inputs inputs;
  Recipe::Forward forward;
};

// Of the operations that are known to give the same bits again; nullopt for others, and where the node has not saved
// what it takes. Which node an operation makes depends on the device, the dtype and the mode (attention has five).
[[nodiscard]] std::optional<Ingredients> ingredients(const std::shared_ptr<torch::autograd::Node>& node);

}  // namespace ebb
