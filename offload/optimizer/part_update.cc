#include "offload/optimizer/part_update.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include "offload/managed/manage.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

constexpr std::int64_t kPiece = 1 << 21;  // elements: with 16 threads 512 KiB in float32 for each

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

// Whether LibTorch's fused kernels are to update the rows.
bool is_fused(const at::Tensor& rows, const at::Tensor& gradient, const Part& part, UpdateOn update_on) {
  return update_on == UpdateOn::kCpu && rows.is_cpu() && gradient.is_cpu() && can_be_fused(rows) &&
         can_be_fused(gradient) &&
         std::ranges::all_of(part, [](const auto& state) { return can_be_fused(state.second); }) &&
         is_apart(gradient, rows, part);
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
                 bool follows_weight) {
  const auto master = part.find(kMaster);
  const bool has_master = master != part.end();
  const bool rounds = has_master && follows_weight;
  const at::Tensor target = has_master ? master->second : rows;
  if (is_fused(rows, gradient, part, update.update_on)) {
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

// What an update takes beside the parameter.
std::vector<at::Tensor> others_of(const at::Tensor& gradient, const std::vector<Part>& parts) {
  std::vector<at::Tensor> others{gradient};
  for (const Part& part : parts) {
    for (const auto& [name, state] : part) {
      others.push_back(state);
    }
  }
  return others;
}

// others_of() of these names, with the parameter before them, as parts.
std::vector<Part> parts_of(const std::vector<at::Tensor>& tensors, const std::vector<std::vector<std::string>>& names) {
  std::vector<Part> parts(names.size());
  auto next = tensors.begin() + 2;
  for (std::size_t i = 0; i < names.size(); ++i) {
    for (const std::string& name : names[i]) {
      parts[i].emplace(name, *next++);
    }
  }
  return parts;
}

}  // namespace

bool can_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts) {
  const auto are_apart = [&](const Part& part) { return is_apart(gradient, parameter, part); };
  std::vector<at::Tensor> tensors = others_of(gradient, parts);
  tensors.push_back(parameter);
  if (!std::ranges::all_of(tensors, can_be_fused) || !std::ranges::all_of(parts, are_apart)) {
    return false;
  }
  return can_be_used_at_home(at::TensorList(tensors).slice(has_home(gradient) ? 0 : 1));
}

void update_now(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                const Update& update, bool follows_weight) {
  const Uses all_parts(/*read=*/gradient, /*written=*/parameter);
  const std::vector<RowRange> ranges = ranges_of(parameter, parts, update);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    std::vector<at::Tensor> states;
    for (const auto& [name, state] : parts[i]) {
      states.push_back(state);
    }
    const Uses one_part(/*read=*/{}, /*written=*/states);
    const at::Tensor rows = ranges[i].of(parameter);
    update_rows(rows, ranges[i].of(gradient), parts[i], update, follows_weight);
  }
}

std::shared_ptr<PostponedWork> postpone_update(const at::Tensor& parameter, const at::Tensor& gradient,
                                               const std::vector<Part>& parts, const Update& update, WorkAt at) {
  ManagedCopy copy;
  if (at == WorkAt::kHome && !has_home(gradient)) {
    refuse_capture(parameter);
    copy = copy_beside(parameter, gradient);
    if (!copy.tensor.defined()) {
      return nullptr;
    }
  }
  std::vector<std::vector<std::string>> names;
  for (const Part& part : parts) {
    std::vector<std::string>& of_part = names.emplace_back();
    for (const auto& [name, state] : part) {
      of_part.push_back(name);
    }
  }
  // The work has the copy of a gradient among the others alone.
  return postpone(
      parameter, others_of(copy.tensor.defined() ? copy.tensor : gradient, parts),
      [names, update, slot = copy.slot](const std::vector<at::Tensor>& tensors, bool has_parameter) {
        update_now(tensors[0], tensors[1], parts_of(tensors, names), update, has_parameter);
      },
      at, target_use_of(update, parts));
}

}  // namespace ebb
