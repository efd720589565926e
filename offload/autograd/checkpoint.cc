#include "offload/checkpoint.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "offload/autograd/engine.h"
#include "offload/autograd/region.h"

namespace ebb {

std::vector<at::Tensor> checkpoint(CheckpointedFunction function, const std::vector<at::Tensor>& inputs,
                                   EarlyStop early_stop) {
  if (!at::GradMode::is_enabled()) {  // nothing is saved
    return function(inputs);
  }
  install_engine();
  return Region::run(Region::make(std::move(function), inputs, early_stop), inputs);
}

}  // namespace ebb
