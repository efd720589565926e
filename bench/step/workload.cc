#include "bench/step/workload.h"

#include <optional>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/checkpoint.h"
#include "offload/guard.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

at::Tensor run_checkpointed(const ModelPart& part, const at::Tensor& x) {
  return checkpoint([part](const std::vector<at::Tensor>& in) { return std::vector{part(in.front())}; }, {x}).front();
}

}  // namespace

std::vector<at::Tensor> StepWorkload::step(StepMethod method, const Calls& calls) {
  std::optional<OffloadGuard> guard;
  if (method.offloader != nullptr) {
    guard.emplace(*method.offloader);
  }
  const at::Tensor hidden = model_->body(method.checkpoints ? run_checkpointed : run_part);
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
