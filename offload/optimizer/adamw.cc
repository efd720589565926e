#include "offload/adamw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
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

using TensorOfRows = at::Tensor AdamWRows::*;
constexpr std::array<std::pair<const char*, TensorOfRows>, 4> kTensors{{{"exp_avg", &AdamWRows::exp_avg},
                                                                        {"exp_avg_sq", &AdamWRows::exp_avg_sq},
                                                                        {"max_exp_avg_sq", &AdamWRows::max_exp_avg_sq},
                                                                        {"master", &AdamWRows::master}}};

constexpr std::int64_t kElementsAtOnce = 1 << 24;  // of a part, or one row

// The parameter's rows by parts: in each, from `begin` to before `end`.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;

  [[nodiscard]] at::Tensor of(const at::Tensor& tensor) const {
    const bool is_whole = tensor.dim() == 0 || (begin == 0 && end == tensor.size(0));
    return is_whole ? tensor : tensor.slice(0, begin, end);
  }
};

std::vector<RowRange> parts_of(const at::Tensor& parameter) {
  const std::int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
  if (parameter.numel() <= kElementsAtOnce) {
    return {{0, rows}};
  }
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, kElementsAtOnce / (parameter.numel() / rows));
  std::vector<RowRange> parts;
  for (std::int64_t begin = 0; begin < rows; begin += rows_at_once) {
    parts.push_back({begin, std::min(begin + rows_at_once, rows)});
  }
  return parts;
}

// The operations of torch::optim::AdamW, one by one: fused kernels round differently. `step` counts from 1.
void update(const at::Tensor& parameter, const at::Tensor& parameters_gradient, const AdamWRows& part,
            const AdamWOptions& options, std::int64_t step) {
  const bool has_master = part.master.defined();
  const at::Tensor& target = has_master ? part.master : parameter;
  const at::Tensor gradient = has_master ? parameters_gradient.to(at::kFloat) : parameters_gradient;
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
    parameter.copy_(part.master);
  }
}

void update(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<AdamWRows>& parts,
            const AdamWOptions& options, std::int64_t step) {
  const OnDevice all_parts({parameter, gradient});
  const std::vector<RowRange> ranges = parts_of(parameter);
  TORCH_CHECK(ranges.size() == parts.size(), "ebb: a parameter of AdamW has other sizes than before");
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const AdamWRows& part = parts[i];
    const OnDevice one_part({part.master, part.exp_avg, part.exp_avg_sq, part.max_exp_avg_sq});
    update(ranges[i].of(parameter), ranges[i].of(gradient), part, options, step);
  }
}

}  // namespace

void AdamWState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step));
  for (const auto& [name, tensor] : kTensors) {
    std::vector<at::Tensor> rows;
    for (const AdamWRows& part : parts) {
      if (const at::Tensor& here = part.*tensor; here.defined()) {  // by an operation, which finds managed bytes
        rows.push_back(here.is_cpu() ? here.clone() : here.cpu());
      }
    }
    if (!rows.empty()) {
      archive.write(name, rows.size() == 1 ? rows.front() : at::cat(rows));
    }
  }
}

void AdamWState::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue steps;
  archive.read("step", steps);
  step = steps.toInt();
  parts.assign(1, {});
  AdamWRows& whole = parts.front();
  for (const auto& [name, tensor] : kTensors) {
    archive.try_read(name, whole.*tensor);
  }
  TORCH_CHECK(whole.exp_avg.defined() && whole.exp_avg_sq.defined(), "ebb: this is no archive of AdamW's states");
}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions defaults, UpdateIn update)
    : Optimizer(groups, std::make_unique<AdamWOptions>(defaults)),
      update_in_(update),
      self_(std::make_shared<AdamW*>(this)) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    check(static_cast<const AdamWOptions&>(group.options()));
    if (update != UpdateIn::kBackward) {
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
      const auto& options = static_cast<const AdamWOptions&>(group.options());
      if (parameter.grad().defined() && !update_at_next_use(parameter, options)) {
        update(parameter, options);
      }
    }
  }
  const MutexLock lock(mutex_);
  updated_.clear();
  return loss;
}

void AdamW::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  const MutexLock lock(mutex_);
  updated_.clear();
}

void AdamW::update_in_backward(const at::Tensor& parameter) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& each : group.params()) {
      if (each.is_same(parameter) && parameter.grad().defined()) {
        {
          const MutexLock lock(mutex_);
          TORCH_CHECK(
              updated_.insert(parameter.unsafeGetTensorImpl()).second,
              "ebb: AdamW with UpdateIn::kBackward got a parameter's second gradient before step(). Each backward "
              "pass is a step there, so gradients cannot be accumulated: call step() after each, or use "
              "UpdateIn::kStep");
        }
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
  const at::Tensor read = needs_master(parameter) ? parameter : at::Tensor();
  const OnDevice all_parts(at::TensorList{read});
  for (const RowRange& range : parts_of(parameter)) {
    const at::Tensor rows = range.of(parameter.detach());
    const auto zeros = [&] {
      at::Tensor made = at::zeros_like(rows, kind, at::MemoryFormat::Preserve);
      manage_beside(parameter, made);
      return made;
    };
    AdamWRows& part = state->parts.emplace_back();
    if (needs_master(parameter)) {
      part.master = rows.to(at::kFloat);
      manage_beside(parameter, part.master);
    }
    part.exp_avg = zeros();
    part.exp_avg_sq = zeros();
    if (options.amsgrad()) {
      part.max_exp_avg_sq = zeros();
    }
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
  ebb::update(parameter, gradient, state.parts, options, state.step += 1);
}

// Returns false where the update cannot wait: some of what it takes may be used without being seen, or is new.
bool AdamW::update_at_next_use(const at::Tensor& parameter, const AdamWOptions& options) {
  const auto known = state_.find(parameter.unsafeGetTensorImpl());
  const at::Tensor gradient = parameter.grad();
  if (update_in_ != UpdateIn::kNextUse || known == state_.end() || gradient.is_sparse()) {
    return false;
  }
  auto& state = static_cast<AdamWState&>(*known->second);
  std::vector<at::Tensor> others{gradient};
  std::vector<TensorOfRows> names;  // of the tensors that each part has
  for (const auto& [name, tensor] : kTensors) {
    if ((state.parts.front().*tensor).defined()) {
      names.push_back(tensor);
    }
  }
  for (const AdamWRows& part : state.parts) {
    for (const TensorOfRows name : names) {
      others.push_back(part.*name);
    }
  }
  const bool waits =
      postpone(parameter, others,
               [names, options, step = state.step + 1](const at::Tensor& target, const std::vector<at::Tensor>& taken) {
                 std::vector<AdamWRows> parts((taken.size() - 1) / names.size());
                 for (std::size_t i = 1; i < taken.size(); ++i) {
                   parts[(i - 1) / names.size()].*names[(i - 1) % names.size()] = taken[i];
                 }
                 ebb::update(target, taken.front(), parts, options, step);
               });
  if (waits) {
    state.step += 1;
    torch::autograd::impl::bump_version(parameter);  // as the update would
  }
  return waits;
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
      std::vector<AdamWRows> parts;
      for (const RowRange& range : parts_of(parameter)) {
        AdamWRows& part = parts.emplace_back();
        for (const auto& [name, tensor] : kTensors) {
          if (const at::Tensor& from = state.parts.front().*tensor; from.defined()) {
            part.*tensor = range.of(from).to(from.options().device(parameter.device()), /*non_blocking=*/false,
                                             /*copy=*/true);
            manage_beside(parameter, part.*tensor);
          }
        }
      }
      state.parts = std::move(parts);
    }
  }
}

}  // namespace ebb
