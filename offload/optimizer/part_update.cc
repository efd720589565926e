#include "offload/optimizer/part_update.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/base/managed_key.h"
#include "offload/managed/at_home.h"
#include "offload/managed/manage.h"
#include "offload/managed/postpone.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

using torch::autograd::impl::bump_version;  // as operations do, and LibTorch's fused kernels do not

constexpr std::int64_t kPiece = 1 << 21;  // elements: with 16 threads 512 KiB in float32 for each

// With whose operations rows are updated. kFused: contiguous ones, on the CPU.
enum class Kernels : std::uint8_t { kOneByOne, kFused };

// A negated tensor's memory has the other sign, and a subclass may have memory elsewhere.
bool can_be_fused(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.is_floating_point() && !tensor.is_neg() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// Where a gradient is the parameter or a state, one operation after the other sees what those before have written, and
// a fused kernel does not.
bool is_apart(const at::Tensor& gradient, const at::Tensor& parameter, const Part& part) {
  const auto is_of_gradient = [&](const at::Tensor& other) {
    return gradient.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
  };
  return !is_of_gradient(parameter) &&
         std::ranges::none_of(part, [&](const auto& state) { return is_of_gradient(state.second); });
}

Kernels kernels_for(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, UpdateOn update_on) {
  const bool all = update_on == UpdateOn::kCpu && rows.is_cpu() && gradient.is_cpu() && can_be_fused(rows) &&
                   can_be_fused(gradient) &&
                   std::ranges::all_of(part, [](const auto& state) { return can_be_fused(state.second); }) &&
                   is_apart(gradient, rows, part);
  return all ? Kernels::kFused : Kernels::kOneByOne;
}

// Updates rows on the CPU, with all of LibTorch's threads. All tensors are contiguous and on the CPU. `rows.gradient`:
// of any floating type. `rounded`: gets the target in its own type; undefined where nothing is to be rounded.
//
// Note [Types in pieces]
// LibTorch's fused kernels want one type for all. So a gradient in bfloat16 is made float32 piece by piece, and each
// piece of the target is rounded as soon as it is updated: pieces are small enough for the cores' caches, so that
// hardly more bytes pass the memory than a kernel for both types would read and write.
void update_on_cpu(const UpdateRule& rule, const RowUpdate& rows, const at::Tensor& rounded) {
  const at::NoGradGuard no_grad;
  const at::Tensor target = rows.target.view({-1});
  const at::Tensor gradient = rows.gradient.view({-1});
  const at::Tensor result = rounded.defined() ? rounded.view({-1}) : at::Tensor();
  const at::Tensor before =  // what the target rounds to
      rounded.defined() ? at::empty({std::min(kPiece, target.numel())}, rounded.options()) : at::Tensor();
  std::map<std::string, at::Tensor> states;
  for (const auto& [name, state] : rows.states) {
    states.emplace(name, state.view({-1}));
  }
  const bool is_converted = gradient.scalar_type() != target.scalar_type();
  const at::Tensor converted =
      is_converted ? at::empty({std::min(kPiece, target.numel())}, target.options()) : at::Tensor();
  for (std::int64_t begin = 0; begin < target.numel(); begin += kPiece) {
    const std::int64_t size = std::min(kPiece, target.numel() - begin);
    const auto piece = [&](const at::Tensor& whole) { return whole.narrow(0, begin, size); };
    std::map<std::string, at::Tensor> piece_states;
    for (const auto& [name, state] : states) {
      piece_states.emplace(name, piece(state));
    }
    const at::Tensor piece_target = piece(target);
    const at::Tensor piece_gradient =
        is_converted ? converted.narrow(0, 0, size).copy_(piece(gradient)) : piece(gradient);
    if (result.defined() && !at::equal(before.narrow(0, 0, size).copy_(piece_target), piece(result))) {
      follow_weight(piece_target, piece(result));  // which makes tensors of the piece's size
    }
    rule.update_fused({piece_target, piece_gradient, piece_states, rows.has_new_states});
    if (result.defined()) {
      piece(result).copy_(piece_target);
    }
  }
}

// `follows_weight`: whether a master takes the weight's value, and the weight the master's.
void update_rows(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, const Update& update,
                 Kernels kernels, bool follows_weight) {
  const auto master = part.find(kMaster);
  const bool has_master = master != part.end();
  const bool rounds = has_master && follows_weight;
  const at::Tensor target = has_master ? master->second : rows;
  if (kernels == Kernels::kFused) {
    update_on_cpu(*update.rule, {target, gradient, part, update.has_new_states}, rounds ? rows : at::Tensor());
    return;
  }
  if (rounds) {
    follow_weight(target, rows);
  }
  const at::Tensor in_targets_type = has_master ? gradient.to(at::kFloat) : gradient;
  update.rule->update({target, in_targets_type, part, update.has_new_states});
  if (rounds) {
    rows.copy_(target);
  }
}

// kRead where the parameter's values go into its states.
PostponedWork::TargetUse target_use_of(const Update& update, const std::vector<Part>& parts) {
  const bool reads = update.rule->do_states_take_target() && !parts.front().empty() && !parts.front().contains(kMaster);
  return reads ? PostponedWork::TargetUse::kRead : PostponedWork::TargetUse::kWritten;
}

std::vector<RowRange> ranges_of(const at::Tensor& parameter, const std::vector<Part>& parts, const Update& update) {
  std::vector<RowRange> ranges = row_ranges(parameter, update.elements_at_once);
  bool are_sizes_alike = ranges.size() == parts.size();
  for (std::size_t i = 0; are_sizes_alike && i < parts.size(); ++i) {
    const at::Tensor rows = ranges[i].of(parameter);
    are_sizes_alike =
        std::ranges::all_of(parts[i], [&](const auto& state) { return state.second.sizes() == rows.sizes(); });
  }
  TORCH_CHECK(are_sizes_alike, "ebb: a parameter of ", update.rule->name(), " has other sizes than before");
  return ranges;
}

// What an update takes beside the parameter: the gradient, unless that is undefined, and then the parts' tensors.
std::vector<at::Tensor> others_of(const at::Tensor& gradient, const std::vector<Part>& parts) {
  std::vector<at::Tensor> others;
  if (gradient.defined()) {
    others.push_back(gradient);
  }
  for (const Part& part : parts) {
    append_tensors(part, others);
  }
  return others;
}

// `home`: of the parameter and others_of(). `copy`: of a gradient that has no home, and that these others lack.
void update_at_home(const AtHome& home, HostCopy* copy, const std::vector<std::string>& names, std::size_t count,
                    const Update& update) {
  const at::Tensor& parameter = home.tensors().front();
  const at::Tensor gradient = copy == nullptr ? home.tensors()[1] : copy->wait();
  const std::vector<Part> parts = as_parts(home.tensors(), copy == nullptr ? 2 : 1, names, count);
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, update);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    update_rows(ranges[i].of(parameter), ranges[i].of(gradient), parts[i], update, Kernels::kFused,
                /*follows_weight=*/true);
  }
}

void update_parts(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                  const Update& update, UpdateOn update_on, bool follows_weight) {
  const OnDevice all_parts(/*read=*/gradient, /*written=*/parameter);
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, update);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::vector<at::Tensor> tensors;
    append_tensors(parts[i], tensors);
    const OnDevice one_part(/*read=*/{}, /*written=*/tensors);
    const at::Tensor rows = ranges[i].of(parameter);
    const at::Tensor rows_gradient = ranges[i].of(gradient);
    update_rows(rows, rows_gradient, parts[i], update, kernels_for(rows, rows_gradient, parts[i], update_on),
                follows_weight);
  }
}

}  // namespace

bool can_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts) {
  const auto are_apart = [&](const Part& part) { return is_apart(gradient, parameter, part); };
  std::vector<at::Tensor> tensors = others_of(gradient, parts);
  tensors.push_back(parameter);
  if (!std::ranges::all_of(tensors, can_be_fused) || !std::ranges::all_of(parts, are_apart)) {
    return false;
  }
  if (!has_home(gradient)) {
    tensors.erase(tensors.begin());
  }
  return AtHome::is_possible(tensors);
}

void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, UpdateOn update_on, bool follows_weight) {
  if (update_on == UpdateOn::kCpu && can_update_at_home(parameter, gradient, parts)) {
    refuse_capture(parameter);
    const bool is_copied = !has_home(gradient);
    const std::shared_ptr<HostCopy> copy = is_copied ? HostCopy::start(parameter, gradient) : nullptr;
    if (copy != nullptr || !is_copied) {
      std::vector<at::Tensor> tensors = others_of(is_copied ? at::Tensor() : gradient, parts);
      tensors.insert(tensors.begin(), parameter);
      if (const std::shared_ptr<AtHome> home = AtHome::of(tensors)) {
        update_at_home(*home, copy.get(), names_of(parts.front()), parts.size(), update);
        bump_version(parameter);
        return;
      }
    }
  }
  update_parts(parameter, gradient, parts, update, update_on, follows_weight);
  if (update_on == UpdateOn::kCpu) {
    bump_version(parameter);
  }
}

bool update_at_next_use(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                        const Update& update, UpdateOn update_on) {
  return postpone(
      parameter, others_of(gradient, parts),
      [names = names_of(parts.front()), count = parts.size(), update, update_on](const at::Tensor& target,
                                                                                 const std::vector<at::Tensor>& taken) {
        update_now(target, taken.front(), as_parts(taken, 1, names, count), update, update_on, is_managed(target));
      },
      target_use_of(update, parts));
}

std::shared_ptr<PostponedWork> update_later_at_home(const at::Tensor& parameter, const at::Tensor& gradient,
                                                    const std::shared_ptr<HostCopy>& copy,
                                                    const std::vector<Part>& parts, const Update& update) {
  const auto on_device = std::make_shared<at::Tensor>();  // the gradient, where the update cannot be done at home
  std::function<void()> prepare;
  if (copy != nullptr) {
    prepare = [copy, on_device, device = parameter.device()] { *on_device = copy->wait().to(device); };
  }
  return postpone_at_home(
      parameter, others_of(copy == nullptr ? gradient : at::Tensor(), parts),
      [copy, on_device, names = names_of(parts.front()), count = parts.size(), update](
          const at::Tensor& target, const std::vector<at::Tensor>& taken, AtHome* home) {
        if (home != nullptr) {
          update_at_home(*home, copy.get(), names, count, update);
          return;
        }
        const at::Tensor& from = copy == nullptr ? taken.front() : *on_device;
        const std::vector<Part> parts = as_parts(taken, copy == nullptr ? 1 : 0, names, count);
        update_parts(target, from, parts, update, UpdateOn::kCpu, is_managed(target));
      },
      target_use_of(update, parts), prepare);
}

}  // namespace ebb
