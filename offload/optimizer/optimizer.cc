#include "offload/optimizer.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include "offload/base/gradient_hook.h"
#include "offload/base/managed_key.h"
#include "offload/managed/observed_operations.h"
#include "offload/optimizer/background_updates.h"
#include "offload/optimizer/part_update.h"
#include "offload/optimizer/parts.h"

namespace ebb {
namespace {

using torch::optim::OptimizerOptions;

constexpr const char* kStep = "step";

bool update_at_next_use(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                        const Update& update, UpdateOn update_on) {
  std::vector<at::Tensor> others{gradient};
  for (const Part& part : parts) {
    append_tensors(part, others);
  }
  return postpone(
      parameter, others,
      [names = names_of(parts.front()), count = parts.size(), update, update_on](const at::Tensor& target,
                                                                                 const std::vector<at::Tensor>& taken) {
        update_now(target, taken.front(), as_parts(taken, 1, names, count), update, update_on, is_managed(target));
      },
      target_use_of(update, parts));
}

}  // namespace

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

Optimizer::Optimizer(const UpdateRule& rule, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     std::unique_ptr<OptimizerOptions> defaults, UpdateIn update_in, UpdateOn update_on)
    : torch::optim::Optimizer(groups, std::move(defaults)),
      rule_(rule),
      update_in_(update_in),
      update_on_(update_on),
      self_(std::make_shared<Optimizer*>(this)),
      background_(new BackgroundUpdates) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    rule_.check(group.options());
  }
  if (update_in != UpdateIn::kBackward) {
    return;
  }
  Place place;
  for (place.group = 0; place.group < param_groups_.size(); ++place.group) {
    const std::vector<at::Tensor>& parameters = param_groups_[place.group].params();
    for (place.in_group = 0; place.in_group < parameters.size(); ++place.in_group) {
      after_each_gradient(parameters[place.in_group], this,
                          [weak = std::weak_ptr(self_), place](const at::Tensor& here) mutable {
                            if (const std::shared_ptr<Optimizer*> self = weak.lock()) {
                              (*self)->update_in_backward(here, place);
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
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    rule_.check(group.options());  // which the program may have changed, or added
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) {
        continue;
      }
      if (update_in_ != UpdateIn::kNextUse || !update_later(parameter, group.options())) {
        update(parameter, group.options());
      }
    }
  }
  const MutexLock lock(mutex_);
  updated_.clear();
  return loss;
}

void Optimizer::zero_grad(bool set_to_none) {
  torch::optim::Optimizer::zero_grad(set_to_none);
  const MutexLock lock(mutex_);
  updated_.clear();
}

// Null where no group has the parameter. The program may change the groups at any time.
const OptimizerOptions* Optimizer::options_of(const at::Tensor& parameter, Place& place) {
  const MutexLock lock(mutex_);  // of `place`, too
  if (place.group < param_groups_.size()) {
    const torch::optim::OptimizerParamGroup& group = param_groups_[place.group];
    if (place.in_group < group.params().size() && group.params()[place.in_group].is_same(parameter)) {
      return &group.options();
    }
  }
  for (place.group = 0; place.group < param_groups_.size(); ++place.group) {
    const std::vector<at::Tensor>& parameters = param_groups_[place.group].params();
    for (place.in_group = 0; place.in_group < parameters.size(); ++place.in_group) {
      if (parameters[place.in_group].is_same(parameter)) {
        return &param_groups_[place.group].options();
      }
    }
  }
  return nullptr;
}

void Optimizer::update_in_backward(const at::Tensor& parameter, Place& place) {
  const OptimizerOptions* const options = parameter.grad().defined() ? options_of(parameter, place) : nullptr;
  if (options == nullptr) {
    return;
  }
  rule_.check(*options);
  {
    const MutexLock lock(mutex_);
    TORCH_CHECK(updated_.insert(parameter.unsafeGetTensorImpl()).second, "ebb: ", rule_.name,
                " with UpdateIn::kBackward got a parameter's second gradient before step(). Each backward pass is a "
                "step there, so gradients cannot be accumulated: call step() after each, or use UpdateIn::kStep");
  }
  if (update_on_ != UpdateOn::kCpu || !update_later(parameter, *options)) {
    update(parameter, *options);
  }
  parameter.mutable_grad().reset();
}

OptimizerState& Optimizer::state_of(const at::Tensor& parameter) {
  const MutexLock lock(mutex_);
  std::unique_ptr<torch::optim::OptimizerParamState>& state = state_[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) {
    state = std::make_unique<OptimizerState>();
  }
  return static_cast<OptimizerState&>(*state);
}

void Optimizer::update(const at::Tensor& parameter, const OptimizerOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = parameter.grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "ebb: ", rule_.name, " does not support gradients that are sparse, ",
              "or have another layout: ", gradient.layout());
  OptimizerState& state = state_of(parameter);
  bool has_new_states = false;
  if (state.parts.empty() || !has_all_states(state.parts.front(), parameter, rule_, options)) {
    std::vector<Part> parts = state.parts;
    has_new_states = add_states(parts, parameter, rule_, options);
    state.parts = std::move(parts);
  }
  const Update update{rule_, options.clone(), state.step += 1, has_new_states};
  update_now(parameter, gradient, state.parts, update, update_on_, /*follows_weight=*/true);
}

// Returns false where the update cannot wait: some of what it takes may be used without being seen, or is new.
bool Optimizer::update_later(const at::Tensor& parameter, const OptimizerOptions& options) {
  const at::Tensor gradient = parameter.grad();
  if (gradient.layout() != c10::kStrided) {
    return false;
  }
  OptimizerState& state = state_of(parameter);
  if (state.parts.empty() || !has_all_states(state.parts.front(), parameter, rule_, options)) {
    return false;
  }
  const Update update{rule_, options.clone(), state.step + 1, /*has_new_states=*/false};
  if (!(update_on_ == UpdateOn::kCpu && background_->update_later(parameter, gradient, state.parts, update)) &&
      !(update_in_ == UpdateIn::kNextUse && update_at_next_use(parameter, gradient, state.parts, update, update_on_))) {
    return false;
  }
  state.step += 1;
  torch::autograd::impl::bump_version(parameter);  // as the update would
  return true;
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
  const at::NoGradGuard no_grad;
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    rule_.check(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      if (known == state_.end()) {
        continue;
      }
      auto& state = static_cast<OptimizerState&>(*known->second);
      if (!state.is_whole) {  // the archive does not have it
        continue;
      }
      std::vector<Part> parts;
      for (const RowRange& range : row_ranges(parameter)) {
        Part& part = parts.emplace_back();
        for (const auto& [name, from] : state.parts.front()) {
          TORCH_CHECK(from.sizes() == parameter.sizes(), "ebb: ", name, " of an archive has the sizes ", from.sizes(),
                      ", and its parameter ", parameter.sizes());
          at::Tensor placed = range.of(from).to(from.options().device(parameter.device()).dtype(state_type(parameter)),
                                                /*non_blocking=*/false, /*copy=*/true);
          manage_beside(parameter, placed);
          part.emplace(name, std::move(placed));
        }
      }
      state.parts = std::move(parts);
      state.is_whole = false;
    }
  }
}

}  // namespace ebb
