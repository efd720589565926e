// What is said once in a process.

#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "offload/offloader.h"
#include "offload/optimizer_step.h"
#include "offload/parameters.h"
#include "test/process/modes.h"
#include "test/process/world.h"

namespace ebb {
namespace {

// Two parameters' states, made as LibTorch's optimizers make them.
void make_states(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    say(at::zeros_like(parameter).sum().item<float>() == 0 ? "state" : "not a state");
  }
}

void states(bool within_step) {
  Offloader offloader(everything(at::kCPU));
  const std::vector<at::Tensor> parameters{at::ones({kSmall}).requires_grad_(), at::ones({kSmall}).requires_grad_()};
  Parameters how;
  how.device_bytes = std::uint64_t{1} << 20;
  how.minimum_bytes = 0;
  offloader.manage(parameters, how);
  make_states({at::ones({kSmall}).requires_grad_()});  // nobody manages the parameter
  if (within_step) {
    const OptimizerStep step(parameters);
    make_states(parameters);
  }
  make_states(parameters);
}

}  // namespace

const Modes kWarningModes{
    {"states_within_a_step", [] { states(true); }},
    {"states_without_a_step", [] { states(false); }},
};

}  // namespace ebb
