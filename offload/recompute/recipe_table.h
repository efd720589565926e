#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "offload/tensors/saved_tensor.h"
#include "policy/policy.h"

namespace ebb {

// The inputs from which a tensor can be computed, and the function that computes it.
struct Ingredients {
  using Inputs = std::vector<std::unique_ptr<SavedTensor>>;  // null for an input that the operation did not get
  using Forward = std::function<at::Tensor(std::span<const at::Tensor>)>;

  Recompute cost = Recompute::kNo;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of the result
  Inputs inputs;
  Forward forward;
};

// How to compute a node's output 0 again, for operations that are known to give the same bits again. nullopt for other
// operations, and where the node has not saved all inputs. Which node an operation makes depends on the device, the
// dtype and the mode (attention has five).
[[nodiscard]] std::optional<Ingredients> ingredients(torch::autograd::Node& node);

}  // namespace ebb
