#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "offload/optimizer/update_rule.h"

namespace ebb {

// Updates rows on the CPU, with all of LibTorch's threads. All tensors are contiguous and on the CPU. `rows.gradient`:
// of any floating type. `rounded`: gets the target in its own type; undefined where nothing is to be rounded.
//
// Note [Types in pieces]
// LibTorch's fused kernels want one type for all. So a gradient in bfloat16 is made float32 piece by piece, and each
// piece of the target is rounded as soon as it is updated: pieces are small enough for the cores' caches, so that
// hardly more bytes pass the memory than a kernel for both types would read and write.
void update_on_cpu(const UpdateRule& rule, const RowUpdate& rows, const at::Tensor& rounded,
                   const torch::optim::OptimizerOptions& options);

}  // namespace ebb
