#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb {

// What checkpoint() runs, and runs again.
using CheckpointedFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

}  // namespace ebb
