#include "test/random/ready_queue.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

namespace ebb::graphs {

void empty_ready_queue() {
  const at::AutoGradMode with_gradients(true);
  const at::Tensor x = at::zeros({}).requires_grad_();
  static_cast<void>(torch::autograd::grad({x.neg()}, {x}));
}

}  // namespace ebb::graphs
