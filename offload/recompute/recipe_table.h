#pragma once

#include <optional>

#include <torch/csrc/autograd/function.h>

#include "offload/recompute/ingredients.h"

namespace ebb {

// How to compute a node's output 0 again, for operations that are known to give the same bits again. nullopt for other
// operations, and where the node has not saved all inputs. Which node an operation makes depends on the device, the
// dtype and the mode (attention has five).
[[nodiscard]] std::optional<Ingredients> ingredients(torch::autograd::Node& node);

}  // namespace ebb
