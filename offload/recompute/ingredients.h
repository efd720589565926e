#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

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

}  // namespace ebb
