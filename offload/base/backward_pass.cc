#include "offload/base/backward_pass.h"

#include <atomic>

#include <torch/csrc/autograd/graph_task.h>

namespace ebb {

int backward_here() { return torch::autograd::get_current_graph_task_id(); }

namespace {

std::atomic<int> running{0};

}  // namespace

int backward_passes() { return running; }

CountedBackward::CountedBackward() { ++running; }
CountedBackward::~CountedBackward() { --running; }

}  // namespace ebb
