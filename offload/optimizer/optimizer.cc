#include "offload/optimizer.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include "offload/base/gradient_hook.h"
#include "offload/base/managed_key.h"
#include "offload/managed/at_home.h"
#include "offload/managed/host_copy.h"
#include "offload/managed/observed_operations.h"
#include "offload/optimizer/background.h"
#include "offload/optimizer/cpu_update.h"
#include "offload/optimizer/update_rule.h"

namespace ebb {
namespace {

using torch::optim::OptimizerOptions;
using Part = std::map<std::string, at::Tensor>;

constexpr const char* kMaster = "master";
constexpr const char* kStep = "step";
constexpr std::int64_t kElementsAtOnce = 1 << 24;  // of a part, or one row

bool needs_master(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
}

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

bool is_wanted(const StateRule& state, const OptimizerOptions& options) {
  return state.is_wanted == nullptr || state.is_wanted(options);
}

bool has_all_states(const Part& part, const at::Tensor& parameter, const UpdateRule& rule,
                    const OptimizerOptions& options) {
  return (!needs_master(parameter) || part.contains(kMaster)) &&
         std::ranges::all_of(rule.states, [&](const StateRule& state) {
           return !is_wanted(state, options) || part.contains(state.name);
         });
}

// Makes what is missing: masters of the parameter, and other states of zeros. Returns whether there are any such
// others.
bool add_states(std::vector<Part>& parts, const at::Tensor& parameter, const UpdateRule& rule,
                const OptimizerOptions& options) {
  const std::vector<RowRange> ranges = parts_of(parameter);
  parts.resize(ranges.size());
  bool has_new_states = false;
  const at::TensorOptions kind = needs_master(parameter) ? parameter.options().dtype(at::kFloat) : at::TensorOptions();
  const OnDevice all_parts(at::TensorList{needs_master(parameter) ? parameter : at::Tensor()});
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor rows = ranges[i].of(parameter.detach());
    const auto add = [&](const std::string& name, at::Tensor made) {
      manage_beside(parameter, made);
      parts[i].emplace(name, std::move(made));
    };
    if (needs_master(parameter) && !parts[i].contains(kMaster)) {
      add(kMaster, rows.to(at::kFloat));
    }
    for (const StateRule& state : rule.states) {
      if (is_wanted(state, options) && !parts[i].contains(state.name)) {
        add(state.name, at::zeros_like(rows, kind, at::MemoryFormat::Preserve));
        has_new_states = true;
      }
    }
  }
  return has_new_states;
}

void append_tensors(const Part& part, std::vector<at::Tensor>& to) {
  for (const auto& [name, tensor] : part) {
    to.push_back(tensor);
  }
}

struct Update {
  std::int64_t step;
  bool has_new_states;
};

// With whose operations rows are updated. kFused: contiguous ones, on the CPU.
enum class Kernels : std::uint8_t { kOneByOne, kFused };

Kernels kernels_for(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, UpdateOn update_on) {
  const auto can_be_fused = [](const at::Tensor& each) {
    return each.is_cpu() && each.is_contiguous() && each.is_floating_point();
  };
  const bool all = update_on == UpdateOn::kCpu && can_be_fused(rows) && can_be_fused(gradient) &&
                   std::ranges::all_of(part, [&](const auto& state) { return can_be_fused(state.second); });
  return all ? Kernels::kFused : Kernels::kOneByOne;
}

void update_rows(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, const UpdateRule& rule,
                 const OptimizerOptions& options, const Update& update, Kernels kernels) {
  const auto master = part.find(kMaster);
  const bool has_master = master != part.end();
  const at::Tensor target = has_master ? master->second : rows;
  if (kernels == Kernels::kFused) {
    update_on_cpu(rule, {target, gradient, part, update.step, update.has_new_states}, has_master ? rows : at::Tensor(),
                  options);
    return;
  }
  const at::Tensor in_targets_type = has_master ? gradient.to(at::kFloat) : gradient;
  rule.update({target, in_targets_type, part, update.step, update.has_new_states}, options);
  if (has_master) {
    rows.copy_(target);
  }
}

std::vector<RowRange> ranges_of(const at::Tensor& parameter, const std::vector<Part>& parts, const UpdateRule& rule) {
  std::vector<RowRange> ranges = parts_of(parameter);
  TORCH_CHECK(ranges.size() == parts.size(), "ebb: a parameter of ", rule.name, " has other sizes than before");
  return ranges;
}

void update_parts(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                  const UpdateRule& rule, const OptimizerOptions& options, const Update& update, UpdateOn update_on) {
  const OnDevice all_parts({parameter, gradient});
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, rule);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::vector<at::Tensor> tensors;
    append_tensors(parts[i], tensors);
    const OnDevice one_part(tensors);
    const at::Tensor rows = ranges[i].of(parameter);
    const at::Tensor rows_gradient = ranges[i].of(gradient);
    update_rows(rows, rows_gradient, parts[i], rule, options, update,
                kernels_for(rows, rows_gradient, parts[i], update_on));
  }
}

// `gradient`: managed, or with a copy in host memory. Returns false, and has done nothing, where some of the bytes
// cannot be used at home.
bool try_to_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, HostCopy* copy,
                           const std::vector<Part>& parts, const UpdateRule& rule, const OptimizerOptions& options,
                           const Update& update) {
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, rule);
  std::vector<at::Tensor> tensors{parameter};
  if (copy == nullptr) {
    tensors.push_back(gradient);
  }
  for (const Part& part : parts) {
    append_tensors(part, tensors);
  }
  const auto can_be_fused = [](const at::Tensor& each) { return each.is_contiguous() && each.is_floating_point(); };
  const std::unique_ptr<AtHome> home = std::ranges::all_of(tensors, can_be_fused) ? AtHome::of(tensors) : nullptr;
  if (home == nullptr) {
    return false;
  }
  auto next = home->tensors().begin();
  const at::Tensor parameter_there = *next++;
  const at::Tensor gradient_there = copy == nullptr ? *next++ : copy->wait();
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    Part part;
    for (const auto& [name, tensor] : parts[i]) {
      part.emplace(name, *next++);
    }
    update_rows(ranges[i].of(parameter_there), ranges[i].of(gradient_there), part, rule, options, update,
                Kernels::kFused);
  }
  return true;
}

// A gradient's copy in host memory for an update at home; null where the gradient is managed, or there is no room.
std::shared_ptr<HostCopy> start_copy(const at::Tensor& parameter, const at::Tensor& gradient) {
  return is_managed(gradient) ? nullptr : HostCopy::start(parameter, gradient);
}

// What the tensors that postponed work gets are: by part, in the order of append_tensors().
std::vector<Part> as_parts(const std::vector<at::Tensor>& tensors, std::size_t first,
                           const std::vector<std::string>& names, std::size_t count) {
  std::vector<Part> parts(count);
  for (std::size_t i = first; i < tensors.size(); ++i) {
    parts[(i - first) / names.size()][names[(i - first) % names.size()]] = tensors[i];
  }
  return parts;
}

std::vector<std::string> names_of(const Part& part) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : part) {
    names.push_back(name);
  }
  return names;
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
      background_(std::make_unique<Background>()) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    rule_.check(group.options());
  }
  if (update_in != UpdateIn::kBackward) {
    return;
  }
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.requires_grad()) {
        continue;  // LibTorch has no room for a hook there
      }
      after_each_gradient(parameter, this, [weak = std::weak_ptr(self_)](const at::Tensor& here) {
        if (const std::shared_ptr<Optimizer*> self = weak.lock()) {
          (*self)->update_in_backward(here);
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
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined() && !update_at_next_use(parameter, group.options())) {
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

void Optimizer::update_in_backward(const at::Tensor& parameter) {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& each : group.params()) {
      if (each.is_same(parameter) && parameter.grad().defined()) {
        {
          const MutexLock lock(mutex_);
          TORCH_CHECK(
              updated_.insert(parameter.unsafeGetTensorImpl()).second, "ebb: ", rule_.name,
              " with UpdateIn::kBackward got a parameter's second gradient before step(). Each backward pass is a "
              "step there, so gradients cannot be accumulated: call step() after each, or use UpdateIn::kStep");
        }
        if (update_on_ != UpdateOn::kCpu || !update_in_background(parameter, group.options())) {
          update(parameter, group.options());
        }
        parameter.mutable_grad().reset();
        return;
      }
    }
  }
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
  TORCH_CHECK(!gradient.is_sparse(), "ebb: ", rule_.name, " does not support sparse gradients");
  OptimizerState& state = state_of(parameter);
  bool has_new_states = false;
  if (state.parts.empty() || !has_all_states(state.parts.front(), parameter, rule_, options)) {
    std::vector<Part> parts = state.parts;
    has_new_states = add_states(parts, parameter, rule_, options);
    state.parts = std::move(parts);
  }
  const Update update{state.step += 1, has_new_states};
  if (update_on_ == UpdateOn::kCpu && is_managed(parameter)) {
    const std::shared_ptr<HostCopy> copy = start_copy(parameter, gradient);
    if ((copy != nullptr || is_managed(gradient)) &&
        try_to_update_at_home(parameter, gradient, copy.get(), state.parts, rule_, options, update)) {
      torch::autograd::impl::bump_version(parameter);
      return;
    }
  }
  update_parts(parameter, gradient, state.parts, rule_, options, update, update_on_);
}

// Returns false where the update cannot wait: some of what it takes may be used without being seen, or is new.
bool Optimizer::update_at_next_use(const at::Tensor& parameter, const OptimizerOptions& options) {
  const auto known = state_.find(parameter.unsafeGetTensorImpl());
  const at::Tensor gradient = parameter.grad();
  if (update_in_ != UpdateIn::kNextUse || known == state_.end() || gradient.is_sparse()) {
    return false;
  }
  if (update_on_ == UpdateOn::kCpu && update_in_background(parameter, options)) {
    return true;
  }
  auto& state = static_cast<OptimizerState&>(*known->second);
  if (state.parts.empty() || !has_all_states(state.parts.front(), parameter, rule_, options)) {
    return false;
  }
  std::vector<at::Tensor> others{gradient};
  for (const Part& part : state.parts) {
    append_tensors(part, others);
  }
  const bool waits =
      postpone(parameter, others,
               [names = names_of(state.parts.front()), count = state.parts.size(), &rule = rule_, on = update_on_,
                options = std::shared_ptr<const OptimizerOptions>(options.clone()),
                step = state.step + 1](const at::Tensor& target, const std::vector<at::Tensor>& taken) {
                 const std::vector<Part> parts = as_parts(taken, 1, names, count);
                 update_parts(target, taken.front(), parts, rule, *options, {step, /*has_new_states=*/false}, on);
               });
  if (waits) {
    state.step += 1;
    torch::autograd::impl::bump_version(parameter);  // as the update would
  }
  return waits;
}

// Leaves the update to a thread that does it at home. Returns false where that cannot be.
bool Optimizer::update_in_background(const at::Tensor& parameter, const OptimizerOptions& options) {
  const at::Tensor gradient = parameter.grad();
  OptimizerState& state = state_of(parameter);
  if (!is_managed(parameter) || parameter.is_cpu() != gradient.is_cpu() || gradient.is_sparse() ||
      state.parts.empty() || !has_all_states(state.parts.front(), parameter, rule_, options)) {
    return false;
  }
  std::shared_ptr<HostCopy> copy = start_copy(parameter, gradient);
  std::vector<at::Tensor> others;
  if (copy == nullptr) {
    others.push_back(gradient);
  }
  for (const Part& part : state.parts) {
    append_tensors(part, others);
  }
  std::shared_ptr<PostponedWork> work =
      postpone_at_home(parameter, others,
                       [copy, names = names_of(state.parts.front()), count = state.parts.size(), &rule = rule_,
                        options = std::shared_ptr<const OptimizerOptions>(options.clone()),
                        step = state.step + 1](const at::Tensor& target, const std::vector<at::Tensor>& taken) {
                         const Update update{step, /*has_new_states=*/false};
                         const std::vector<Part> parts = as_parts(taken, copy == nullptr ? 1 : 0, names, count);
                         const at::Tensor gradient = copy == nullptr ? taken.front() : at::Tensor();
                         if (!try_to_update_at_home(target, gradient, copy.get(), parts, rule, *options, update)) {
                           update_parts(target, copy == nullptr ? gradient : copy->wait().to(target.device()), parts,
                                        rule, *options, update, UpdateOn::kCpu);
                         }
                       });
  if (work == nullptr) {
    return false;
  }
  state.step += 1;
  torch::autograd::impl::bump_version(parameter);  // as the update would
  background_->add(std::move(work));
  const MutexLock lock(mutex_);
  std::erase_if(copies_, [](const std::shared_ptr<HostCopy>& each) { return each->try_to_let_go(); });
  if (copy != nullptr) {
    copies_.push_back(std::move(copy));
  }
  return true;
}

void Optimizer::place_loaded_states() {
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      if (known == state_.end()) {
        continue;
      }
      auto& state = static_cast<OptimizerState&>(*known->second);
      const Part& whole = state.parts.front();
      std::vector<Part> parts;
      for (const RowRange& range : parts_of(parameter)) {
        Part& part = parts.emplace_back();
        for (const auto& [name, from] : whole) {
          at::Tensor placed = range.of(from).to(from.options().device(parameter.device()), /*non_blocking=*/false,
                                                /*copy=*/true);
          manage_beside(parameter, placed);
          part.emplace(name, std::move(placed));
        }
      }
      state.parts = std::move(parts);
    }
  }
}

}  // namespace ebb
