#include "offload/optimizer_step.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace ebb {
namespace {

// Of the steps that have begun on the thread. Those that have ended, perhaps on another thread, are null.
thread_local std::vector<std::weak_ptr<const std::vector<at::Tensor>>> steps_here;
std::atomic_bool known{false};

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

}  // namespace

OptimizerStep::OptimizerStep(const torch::optim::Optimizer& optimizer) : OptimizerStep(parameters_of(optimizer)) {}

OptimizerStep::OptimizerStep(std::vector<at::Tensor> parameters)
    : parameters_(std::make_shared<const std::vector<at::Tensor>>(std::move(parameters))) {
  std::erase_if(steps_here, [](const auto& step) { return step.expired(); });
  steps_here.push_back(parameters_);
  known = true;
}

bool OptimizerStep::is_known() { return known; }

bool OptimizerStep::steps(const at::Tensor& parameter) {
  return std::ranges::any_of(steps_here, [&](const auto& step) {
    const std::shared_ptr<const std::vector<at::Tensor>> parameters = step.lock();
    return parameters != nullptr &&
           std::ranges::any_of(*parameters, [&](const at::Tensor& each) { return each.is_same(parameter); });
  });
}

}  // namespace ebb
