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
// over from a node, until the hook is done. An alias without the dispatch key would find no memory. So a gradient gets
// its home when the next one is accumulated, and the last one when the backward pass is over: by then
// LibTorch's alias is gone, and whoever else shares the storage is the program.
//
// The program's hooks come before that, and may hand the gradient to another thread. So the gradient gets the dispatch
// key before these hooks run, while the leaf alone has it (watch): from then on every operation is seen, and a gradient
// that one is using when its turn comes waits for the next gradient's.
void manage_gradients(const std::shared_ptr<ManagedSet>& set, const at::Tensor& leaf);

}  // namespace ebb
