#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/tensors/saved_tensor.h"
#include "policy/policy.h"

namespace ebb {

// What a tensor can be computed from, and how.
struct Ingredients {
  using Inputs = std::vector<std::unique_ptr<SavedTensor>>;  // null where nothing is taken in that place
  using Forward = std::function<at::Tensor(std::span<const at::Tensor>)>;

  Recompute cost = Recompute::kNo;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of the result
  Inputs inputs;
  Forward forward;
};

}  // namespace ebb
