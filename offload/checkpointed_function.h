#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb {

// The function that checkpoint() runs in forward and again in backward.
using CheckpointedFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

}  // namespace ebb
