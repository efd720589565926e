#include "offload/optimizer_step.h"

#include <algorithm>
#include <utility>

#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

// The steps of all threads: a step of Python's may end on another thread than its own.
struct Steps {
  Mutex mutex;
  std::vector<const OptimizerStep*> all EBB_GUARDED_BY(mutex);
};

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
    : parameters_(std::move(parameters)), thread_(std::this_thread::get_id()) {
  Steps& steps = PerProcess<Steps>::here();
  const MutexLock lock(steps.mutex);
  steps.all.push_back(this);
}

OptimizerStep::~OptimizerStep() {
  Steps& steps = PerProcess<Steps>::here();
  const MutexLock lock(steps.mutex);
  std::erase(steps.all, this);
}

bool OptimizerStep::steps(const at::Tensor& parameter) {
  Steps& steps = PerProcess<Steps>::here();
  const MutexLock lock(steps.mutex);
  return std::ranges::any_of(steps.all, [&](const OptimizerStep* step) {
    return step->thread_ == std::this_thread::get_id() &&
           std::ranges::any_of(step->parameters_, [&](const at::Tensor& each) { return each.is_same(parameter); });
  });
}

}  // namespace ebb
