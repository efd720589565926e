#include "offload/optimizer/part_update.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/base/managed_key.h"
#include "offload/managed/at_home.h"
#include "offload/managed/observed_operations.h"
#include "offload/optimizer/cpu_update.h"

namespace ebb {
namespace {

// With whose operations rows are updated. kFused: contiguous ones, on the CPU.
enum class Kernels : std::uint8_t { kOneByOne, kFused };

bool can_be_fused(const at::Tensor& tensor) { return tensor.is_contiguous() && tensor.is_floating_point(); }

Kernels kernels_for(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, UpdateOn update_on) {
  const bool all = update_on == UpdateOn::kCpu && rows.is_cpu() && gradient.is_cpu() && can_be_fused(rows) &&
                   can_be_fused(gradient) &&
                   std::ranges::all_of(part, [](const auto& state) { return can_be_fused(state.second); });
  return all ? Kernels::kFused : Kernels::kOneByOne;
}

void update_rows(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, const Update& update,
                 Kernels kernels) {
  const auto master = part.find(kMaster);
  const bool has_master = master != part.end();
  const at::Tensor target = has_master ? master->second : rows;
  if (kernels == Kernels::kFused) {
    const at::Tensor rounded = has_master ? rows : at::Tensor();
    update_on_cpu(update.rule, {target, gradient, part, update.step, update.has_new_states}, rounded, *update.options);
    return;
  }
  const at::Tensor in_targets_type = has_master ? gradient.to(at::kFloat) : gradient;
  update.rule.update({target, in_targets_type, part, update.step, update.has_new_states}, *update.options);
  if (has_master) {
    rows.copy_(target);
  }
}

std::vector<RowRange> ranges_of(const at::Tensor& parameter, const std::vector<Part>& parts, const UpdateRule& rule) {
  std::vector<RowRange> ranges = row_ranges(parameter);
  TORCH_CHECK(ranges.size() == parts.size(), "ebb: a parameter of ", rule.name, " has other sizes than before");
  return ranges;
}

// A gradient's copy in host memory; null where the gradient is managed, or there is no room.
std::shared_ptr<HostCopy> start_copy(const at::Tensor& parameter, const at::Tensor& gradient) {
  return is_managed(gradient) ? nullptr : HostCopy::start(parameter, gradient);
}

// `copy`: of the gradient; null where that is managed.
bool try_to_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, HostCopy* copy,
                           const std::vector<Part>& parts, const Update& update) {
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, update.rule);
  std::vector<at::Tensor> tensors{parameter};
  if (copy == nullptr) {
    tensors.push_back(gradient);
  }
  for (const Part& part : parts) {
    append_tensors(part, tensors);
  }
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
    update_rows(ranges[i].of(parameter_there), ranges[i].of(gradient_there), part, update, Kernels::kFused);
  }
  return true;
}

void update_parts(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                  const Update& update, UpdateOn update_on) {
  const OnDevice all_parts({parameter, gradient});
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, update.rule);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::vector<at::Tensor> tensors;
    append_tensors(parts[i], tensors);
    const OnDevice one_part(tensors);
    const at::Tensor rows = ranges[i].of(parameter);
    const at::Tensor rows_gradient = ranges[i].of(gradient);
    update_rows(rows, rows_gradient, parts[i], update, kernels_for(rows, rows_gradient, parts[i], update_on));
  }
}

}  // namespace

void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, UpdateOn update_on) {
  if (update_on == UpdateOn::kCpu) {
    const std::shared_ptr<HostCopy> copy = start_copy(parameter, gradient);
    if ((copy != nullptr || is_managed(gradient)) &&
        try_to_update_at_home(parameter, gradient, copy.get(), parts, update)) {
      torch::autograd::impl::bump_version(parameter);  // as operations on the parameter do
      return;
    }
  }
  update_parts(parameter, gradient, parts, update, update_on);
}

bool owns_gradient_alone(const at::Tensor& leaf) {
  // An accumulated gradient that was a node's result shares its storage with that result, which only LibTorch has.
  constexpr std::size_t kGradientAndResult = 2;
  const at::Tensor& gradient = leaf.grad();
  return gradient.use_count() == 1 && gradient.storage().use_count() <= kGradientAndResult;
}

UpdateLater update_later_at_home(const at::Tensor& parameter, const at::Tensor& gradient, bool owns_gradient,
                                 const std::vector<Part>& parts, const Update& update) {
  UpdateLater later{nullptr, owns_gradient ? start_copy(parameter, gradient) : nullptr};
  std::vector<at::Tensor> others;
  if (later.copy == nullptr) {
    others.push_back(gradient);
  }
  for (const Part& part : parts) {
    append_tensors(part, others);
  }
  later.work =
      postpone_at_home(parameter, others,
                       [copy = later.copy, names = names_of(parts.front()), count = parts.size(), update](
                           const at::Tensor& target, const std::vector<at::Tensor>& taken) {
                         const std::vector<Part> taken_parts = as_parts(taken, copy == nullptr ? 1 : 0, names, count);
                         const at::Tensor taken_gradient = copy == nullptr ? taken.front() : at::Tensor();
                         if (!try_to_update_at_home(target, taken_gradient, copy.get(), taken_parts, update)) {
                           const at::Tensor there = copy == nullptr ? taken_gradient : copy->wait().to(target.device());
                           update_parts(target, there, taken_parts, update, UpdateOn::kCpu);
                         }
                       });
  return later;
}

}  // namespace ebb
