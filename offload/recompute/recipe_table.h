#pragma once

#include <memory>
#include <optional>

#include <torch/csrc/autograd/function.h>

#include "offload/recompute/ingredients.h"

namespace ebb {

// What a node's output 0 can be computed from, and with what dtype. For operations that are known to give the same bits
// again; nullopt for others, and where the node has not saved
// what it takes. Which node an operation makes depends on the device, the dtype and the mode (attention has five).
[[nodiscard]] std::optional<Ingredients> ingredients(const std::shared_ptr<torch::autograd::Node>& node);

}  // namespace ebb
