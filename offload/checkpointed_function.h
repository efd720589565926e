#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ebb {

// The function that checkpoint() runs in forward and again in backward.
using CheckpointedFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Whether the second run is left, by an exception that is no std::exception, at the last save that backward can ask
// for. What comes behind, such as a block's last matmul, is then not computed again. An exception must be able to leave
// the function at any operation. Destructors, not later statements, must put back what the function changes for a while
// (a model's mode, a lock, frozen weights). With kNo the whole function runs a second time.
enum class EarlyStop : bool { kNo, kYes };

}  // namespace ebb
