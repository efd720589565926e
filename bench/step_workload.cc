#include "bench/step_workload.h"

#include <optional>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"
#include "offload/offloader.h"

namespace ebb {

std::vector<at::Tensor> StepWorkload::step(Offloader* offloader, const Calls& calls) {
  std::optional<OffloadGuard> guard;
  if (offloader != nullptr) {
    guard.emplace(*offloader);
  }
  const at::Tensor hidden = model_->body();
  at::Tensor loss;
  {
    const NoOpGuard head;
    const at::Tensor output = model_->head(hidden);
    if (calls.after_head) {
      calls.after_head();
    }
    loss = at::logsumexp(output.to(at::kFloat), -1).mean();
  }
  if (calls.before_backward) {
    calls.before_backward();
  }
  return torch::autograd::grad({loss}, model_->parameters());
}

}  // namespace ebb
