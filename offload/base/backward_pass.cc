#include "offload/base/backward_pass.h"

#include <torch/csrc/autograd/graph_task.h>

namespace ebb {

int backward_here() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace ebb
