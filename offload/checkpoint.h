#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/checkpointed_function.h"

namespace ebb {

// Returns function(inputs), of which autograd saves nothing but the inputs: backward runs the function once more, just
// before it first needs what that saved, and lets go of each saved tensor once it has been used. The inputs are saved
// as any tensor is, so under an OffloadGuard they move. Gradients are those of plain autograd, bit for bit.
//
// The second run has the first one's autocast and, if the first one drew random numbers, its random state, and leaves
// both as they were. (Other threads must not draw from the default generators meanwhile, which are the process's.) It
// must save the same tensors in the same order, which every function does that is not changed by having been run; if it
// does not, backward throws c10::Error. What the function captures must not be changed in between either, lives as long
// as the graph, and may see side effects twice. Inputs that are written to raise LibTorch's error. A function that goes
// backward over what it has computed itself gets c10::Error.
//
// Under the guard of an offloader with a plan (Options::device_budget), the plan decides for each outermost region
// whether it is run again; where there is room, what it saves stays, and the function runs once.
//
// Regions may nest, in each other and with guards, be unpacked in any order and more than once (retain_graph), and be
// derived twice. All that is saved inside is the region's, whatever guards the function enters.
//
// Threads: any. A function may be called again on a thread of the autograd engine, for each region on one at a time.
// Errors: what the function throws, from this call or from backward.
[[nodiscard]] std::vector<at::Tensor> checkpoint(CheckpointedFunction function, const std::vector<at::Tensor>& inputs);

}  // namespace ebb
