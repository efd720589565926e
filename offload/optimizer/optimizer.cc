#include "offload/optimizer.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "offload/base/gradient_hook.h"
#include "offload/optimizer/parts.h"
#include "offload/optimizer/update_rule.h"
#include "offload/optimizer/updates.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

using torch::optim::OptimizerOptions;

constexpr const char* kStep = "step";

}  // namespace

struct Optimizer::Shared {
  Mutex mutex;  // of state_, too: leaves of several devices have their gradients on several threads
  const std::shared_ptr<Optimizer*> self;  // for hooks of the program's that wrap ours, and may outlive the optimizer
  Updates updates;
};

void OptimizerState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write(kStep, c10::IValue(step));
  if (parts.empty()) {
    return;
  }
  for (const auto& [name, first] : parts.front()) {
    std::vector<at::Tensor> rows;
    for (const Part& part : parts) {
      const at::Tensor& here = part.at(name);
      rows.push_back(here.is_cpu() ? here.clone() : here.cpu());  // by an operation, which finds managed bytes
    }
    archive.write(name, rows.size() == 1 ? rows.front() : at::cat(rows));
  }
}

void OptimizerState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue steps;
  archive.read(kStep, steps);
  step = steps.toInt();
  parts.assign(1, {});
  is_whole = true;
  for (const std::string& name : archive.keys()) {
    if (name != kStep) {
      archive.read(name, parts.front()[name]);
    }
  }
}

Optimizer::Optimizer(RuleOf rule_of, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     std::unique_ptr<OptimizerOptions> defaults, UpdateIn update_in, UpdateOn update_on)
    : torch::optim::Optimizer(groups, std::move(defaults)),
      rule_of_(rule_of),
      shared_(new Shared{.mutex{}, .self = std::make_shared<Optimizer*>(this), .updates{update_in, update_on}}) {
  check_options();
  if (update_in != UpdateIn::kBackward) {
    return;
  }
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (std::size_t place = 0; place < group.params().size(); ++place) {
      after_each_gradient(group.params()[place], this,
                          [weak = std::weak_ptr(shared_->self), place](const at::Tensor& here) {
                            const std::shared_ptr<Optimizer*> self = weak.lock();
                            const OptimizerOptions* const options =
                                self != nullptr && here.grad().defined() ? (*self)->options_of(here, place) : nullptr;
                            if (options != nullptr) {
                              (*self)->update(here, *options, /*in_backward=*/true);
                            }
                          });
    }
  }
}

Optimizer::~Optimizer() {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      leave_gradients_alone(parameter, this);
    }
  }
}

at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  check_options();  // which the program may have changed, or added
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) {
        update(parameter, group.options(), /*in_backward=*/false);
      }
    }
  }
  shared_->updates.end_step();
  return loss;
}

void Optimizer::zero_grad(bool set_to_none) {
  torch::optim::Optimizer::zero_grad(set_to_none);
  shared_->updates.end_step();
}

void Optimizer::check_options() const {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    rule_of_(group.options(), 1)->check();
  }
}

// Null where no group has the parameter. The program may change the groups at any time. `place`: where the parameter
// was in its group.
const OptimizerOptions* Optimizer::options_of(const at::Tensor& parameter, std::size_t place) const {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    if (place < group.params().size() && group.params()[place].is_same(parameter)) {
      return &group.options();
    }
  }
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    if (std::ranges::any_of(group.params(), [&](const at::Tensor& each) { return each.is_same(parameter); })) {
      return &group.options();
    }
  }
  return nullptr;
}

void Optimizer::update(const at::Tensor& parameter, const OptimizerOptions& options, bool in_backward) {
  OptimizerState& state = state_of(parameter);
  const std::shared_ptr<UpdateRule> rule = rule_of_(options, state.step + 1);
  rule->check();  // the program may have changed the options
  shared_->updates.update(parameter, state.parts, rule,
                          in_backward ? Updates::Called::kInBackward : Updates::Called::kInStep);
  state.step += 1;
}

OptimizerState& Optimizer::state_of(const at::Tensor& parameter) {
  const MutexLock lock(shared_->mutex);
  std::unique_ptr<torch::optim::OptimizerParamState>& state = state_[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) {
    state = std::make_unique<OptimizerState>();
  }
  return static_cast<OptimizerState&>(*state);
}

void Optimizer::load_by(const std::function<void()>& read) {
  std::vector<torch::optim::OptimizerParamGroup> groups = param_groups_;
  decltype(state_) states;
  for (const auto& [key, state] : state_) {
    states[key] = state->clone();
  }
  try {
    read();
    place_loaded_states();
  } catch (...) {
    param_groups_.swap(groups);
    state_ = std::move(states);
    throw;
  }
}

void Optimizer::place_loaded_states() {
  check_options();
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      if (known == state_.end()) {
        continue;
      }
      auto& state = static_cast<OptimizerState&>(*known->second);
      if (state.is_whole) {  // otherwise the archive does not have it
        state.parts = place_states(parameter, state.parts.front(), kElementsAtOnce);
        state.is_whole = false;
      }
    }
  }
}

template <typename Options>
OptimizerWith<Options>::OptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                                      UpdateIn update_in, UpdateOn update_on)
    : Optimizer(&rule_of<Options>, groups, std::make_unique<Options>(std::move(defaults)), update_in, update_on) {}

template <typename Options>
OptimizerWith<Options>::OptimizerWith(std::vector<at::Tensor> parameters, Options defaults, UpdateIn update_in,
                                      UpdateOn update_on)
    : OptimizerWith({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), update_in,
                    update_on) {}

template <typename Options>
void OptimizerWith<Options>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<OptimizerState, Options>(archive, *this);
}

template <typename Options>
void OptimizerWith<Options>::load(torch::serialize::InputArchive& archive) {
  load_by([&] { torch::optim::serialize<OptimizerState, Options>(archive, *this); });
}

template class OptimizerWith<torch::optim::AdamWOptions>;
template class OptimizerWith<torch::optim::AdamOptions>;
template class OptimizerWith<torch::optim::SGDOptions>;

}  // namespace ebb
