#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "offload/managed/managed_set.h"

namespace ebb {

// Has the set manage each gradient that backward accumulates in this leaf, from when the gradient is whole. A gradient
// whose memory something else shares, or that has a history of its own (create_graph), stays on the device.
//
// Note [When a gradient is managed]
// LibTorch calls a hook when it has accumulated a gradient, but it still holds an alias of a gradient that it has taken
// over from a node, until the hook is done. An alias without the dispatch key would find no memory. So a gradient is
// managed when the next one is accumulated, and the last one when the backward pass is over: by then
// LibTorch's alias is gone, and whoever else shares the storage is the program.
void manage_gradients(const std::shared_ptr<ManagedSet>& set, const at::Tensor& leaf);

}  // namespace ebb
