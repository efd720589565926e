#include "offload/adamw.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "offload/base/gradient_hook.h"
#include "offload/managed/observed_operations.h"

namespace ebb {
namespace {

using torch::optim::AdamWOptions;

bool needs_master(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
}

void check(const AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto is_share = [](double beta) { return beta >= 0 && beta < 1; };
  if (!(options.lr() >= 0) || !(options.eps() >= 0) || !(options.weight_decay() >= 0) || !is_share(beta1) ||
      !is_share(beta2)) {
    throw std::invalid_argument("ebb: AdamW needs lr, eps and weight_decay of at least 0, and betas in [0, 1)");
  }
}

// Written by operations, so that the bytes of a managed tensor are found.
void write(torch::serialize::OutputArchive& archive, const std::string& key, const at::Tensor& tensor) {
  if (tensor.defined()) {
    archive.write(key, tensor.is_cpu() ? tensor.clone() : tensor.cpu());
  }
}

// A parameter, or some rows of one, with what belongs to it; master and max_exp_avg_sq may be undefined.
struct Part {
  at::Tensor parameter;
  at::Tensor gradient;
  at::Tensor master;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor max_exp_avg_sq;
};

// An update makes temporary tensors of so many elements, or of one row of the parameter.
constexpr std::int64_t kElementsAtOnce = 1 << 24;

Part rows_of(const Part& whole, std::int64_t begin, std::int64_t end) {
  const auto cut = [=](const at::Tensor& tensor) { return tensor.defined() ? tensor.slice(0, begin, end) : tensor; };
  return {cut(whole.parameter), cut(whole.gradient),   cut(whole.master),
          cut(whole.exp_avg),   cut(whole.exp_avg_sq), cut(whole.max_exp_avg_sq)};
}

// The operations of torch::optim::AdamW, one by one: fused kernels round differently. `step` counts from 1.
void update(const Part& part, const AdamWOptions& options, std::int64_t step) {
  const bool has_master = part.master.defined();
  const at::Tensor& target = has_master ? part.master : part.parameter;
  const at::Tensor gradient = has_master ? part.gradient.to(at::kFloat) : part.gradient;
  const auto [beta1, beta2] = options.betas();
  const double correction1 = 1 - std::pow(beta1, step);
  const double correction2 = 1 - std::pow(beta2, step);
  if (options.weight_decay() != 0) {
    target.mul_(1 - options.lr() * options.weight_decay());
  }
  part.exp_avg.mul_(beta1).add_(gradient, 1 - beta1);
  part.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  at::Tensor largest = part.exp_avg_sq;
  if (options.amsgrad()) {
    largest = part.max_exp_avg_sq;
    at::maximum_out(largest, part.exp_avg_sq, part.max_exp_avg_sq);
  }
  const at::Tensor divisor = largest.sqrt().div_(std::sqrt(correction2)).add_(options.eps());
  target.addcdiv_(part.exp_avg, divisor, -options.lr() / correction1);
  if (has_master) {
    part.parameter.copy_(part.master);
  }
}

}  // namespace

void AdamWState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step));
  write(archive, "exp_avg", exp_avg);
  write(archive, "exp_avg_sq", exp_avg_sq);
  write(archive, "max_exp_avg_sq", max_exp_avg_sq);
  write(archive, "master", master);
}

void AdamWState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue steps;
  archive.read("step", steps);
  step = steps.toInt();
  archive.read("exp_avg", exp_avg);
  archive.read("exp_avg_sq", exp_avg_sq);
  archive.try_read("max_exp_avg_sq", max_exp_avg_sq);
  archive.try_read("master", master);
}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions defaults, UpdateIn update)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)), self_(std::make_shared<AdamW*>(this)) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    check(static_cast<const AdamWOptions&>(group.options()));
    if (update == UpdateIn::kStep) {
      continue;
    }
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.requires_grad()) {
        continue;  // LibTorch has no room for a hook there
      }
      after_each_gradient(parameter, this, [weak = std::weak_ptr(self_)](const at::Tensor& here) {
        if (const std::shared_ptr<AdamW*> self = weak.lock()) {
          (*self)->update_in_backward(here);
        }
      });
    }
  }
}

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults, UpdateIn update)
    : AdamW({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), update) {}

AdamW::~AdamW() {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      leave_gradients_alone(parameter, this);
    }
  }
}

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) {
        update(parameter, static_cast<const AdamWOptions&>(group.options()));
      }
    }
  }
  return loss;
}

void AdamW::update_in_backward(const at::Tensor& parameter) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& each : group.params()) {
      if (each.is_same(parameter) && parameter.grad().defined()) {
        update(parameter, static_cast<const AdamWOptions&>(group.options()));
        parameter.mutable_grad().reset();
        return;
      }
    }
  }
}

AdamWState& AdamW::state_of(const at::Tensor& parameter, const AdamWOptions& options) {
  void* const key = parameter.unsafeGetTensorImpl();
  {
    const MutexLock lock(mutex_);
    if (const auto known = state_.find(key); known != state_.end()) {
      return static_cast<AdamWState&>(*known->second);
    }
  }
  auto state = std::make_unique<AdamWState>();
  const at::TensorOptions kind = needs_master(parameter) ? parameter.options().dtype(at::kFloat) : at::TensorOptions();
  const auto zeros = [&] {
    at::Tensor made = at::zeros_like(parameter, kind, at::MemoryFormat::Preserve);
    manage_beside(parameter, made);
    return made;
  };
  if (needs_master(parameter)) {
    state->master = parameter.detach().to(at::kFloat);
    manage_beside(parameter, state->master);
  }
  state->exp_avg = zeros();
  state->exp_avg_sq = zeros();
  if (options.amsgrad()) {
    state->max_exp_avg_sq = zeros();
  }
  AdamWState& made = *state;
  const MutexLock lock(mutex_);
  state_[key] = std::move(state);
  return made;
}

void AdamW::update(const at::Tensor& parameter, const AdamWOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor gradient = parameter.grad();
  TORCH_CHECK(!gradient.is_sparse(), "ebb: AdamW does not support sparse gradients");
  AdamWState& state = state_of(parameter, options);
  const OnDevice together({parameter, gradient, state.master, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq});
  state.step += 1;
  const Part whole{parameter, gradient, state.master, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq};
  const std::int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
  const std::int64_t rows_at_once =
      std::max<std::int64_t>(1, kElementsAtOnce * rows / std::max<std::int64_t>(1, parameter.numel()));
  if (rows <= rows_at_once) {
    ebb::update(whole, options, state.step);
    return;
  }
  for (std::int64_t begin = 0; begin < rows; begin += rows_at_once) {
    ebb::update(rows_of(whole, begin, std::min(begin + rows_at_once, rows)), options, state.step);
  }
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWState, AdamWOptions>(archive, *this);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamWState, AdamWOptions>(archive, *this);
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      if (known == state_.end()) {
        continue;
      }
      auto& state = static_cast<AdamWState&>(*known->second);
      for (at::Tensor* const each : {&state.exp_avg, &state.exp_avg_sq, &state.max_exp_avg_sq, &state.master}) {
        if (each->defined()) {
          *each = each->to(parameter.device());
          manage_beside(parameter, *each);
        }
      }
    }
  }
}

}  // namespace ebb
