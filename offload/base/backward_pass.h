#pragma once

#include <torch/csrc/autograd/graph_task.h>

namespace ebb {

// The backward pass that the calling thread is running, as LibTorch numbers backward passes; -1 for none.
[[nodiscard]] inline int backward_here() { return torch::autograd::get_current_graph_task_id(); }

[[nodiscard]] inline bool in_backward() { return backward_here() != -1; }

}  // namespace ebb
