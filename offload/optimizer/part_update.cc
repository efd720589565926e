#include "offload/optimizer/part_update.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
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

// Whether fused kernels take these. Where a gradient is the parameter or a state, one operation after the other sees
// what those before have written, and a fused kernel does not.
bool can_be_fused(const at::Tensor& parameter, const at::Tensor& gradient, const Part& part) {
  const auto can_be_beside_gradient = [&](const at::Tensor& other) {
    return can_be_fused(other) && gradient.storage().unsafeGetStorageImpl() != other.storage().unsafeGetStorageImpl();
  };
  return can_be_fused(gradient) && can_be_beside_gradient(parameter) &&
         std::ranges::all_of(part, [&](const auto& state) { return can_be_beside_gradient(state.second); });
}

// Has a master take the weight's value wherever the master does not round to it: the program has written the weight.
void follow_weight(const at::Tensor& master, const at::Tensor& weight) {
  master.copy_(at::where(master.to(weight.scalar_type()).eq(weight), master, weight.to(master.scalar_type())));
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
  const std::int64_t elements = rows.target.numel();
  const bool is_converted = rows.gradient.scalar_type() != rows.target.scalar_type();
  const auto room_for_piece = [&](const at::TensorOptions& kind) {
    return at::empty({std::min(kPiece, elements)}, kind);
  };
  const at::Tensor converted = is_converted ? room_for_piece(rows.target.options()) : at::Tensor();
  const at::Tensor before =  // what the target rounds to
      rounded.defined() ? room_for_piece(rounded.options()) : at::Tensor();
  for (std::int64_t begin = 0; begin < elements; begin += kPiece) {
    const std::int64_t size = std::min(kPiece, elements - begin);
    const auto piece = [&](const at::Tensor& whole) { return whole.view({-1}).narrow(0, begin, size); };
    std::map<std::string, at::Tensor> states;
    for (const auto& [name, state] : rows.states) {
      states.emplace(name, piece(state));
    }
    const at::Tensor target = piece(rows.target);
    const at::Tensor gradient =
        is_converted ? converted.narrow(0, 0, size).copy_(piece(rows.gradient)) : piece(rows.gradient);
    if (rounded.defined() && !at::equal(before.narrow(0, 0, size).copy_(target), piece(rounded))) {
      follow_weight(target, piece(rounded));  // which makes tensors of the piece's size
    }
    rule.update_fused({target, gradient, states, rows.has_new_states});
    if (rounded.defined()) {
      piece(rounded).copy_(target);
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
  if (update.update_on == UpdateOn::kCpu && rows.is_cpu() && gradient.is_cpu() && can_be_fused(rows, gradient, part)) {
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

// The gradient, or where that has no home, a copy that has. None where the copy finds no room.
ManagedCopy with_home(const at::Tensor& parameter, const at::Tensor& gradient) {
  refuse_capture(parameter);
  return has_home(gradient) ? ManagedCopy{nullptr, gradient} : copy_beside(parameter, gradient);
}

// Sets the tensors, in the order of others_of(). None: to undefined ones.
void set_states(std::vector<Part>& parts, at::TensorList states) {
  const at::Tensor* next = states.begin();
  for (Part& part : parts) {
    for (auto& [name, state] : part) {
      state = states.empty() ? at::Tensor() : *next++;
    }
  }
}

}  // namespace

bool can_update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts) {
  if (!std::ranges::all_of(parts, [&](const Part& part) { return can_be_fused(parameter, gradient, part); })) {
    return false;
  }
  std::vector<at::Tensor> tensors = others_of(gradient, parts);
  tensors.push_back(parameter);
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
  const ManagedCopy from = at == WorkAt::kHome ? with_home(parameter, gradient) : ManagedCopy{nullptr, gradient};
  if (!from.tensor.defined()) {
    return nullptr;
  }
  const bool reads_parameter =  // into its states
      update.rule->do_states_take_target() && !parts.front().empty() && !parts.front().contains(kMaster);
  std::vector<Part> names = parts;
  set_states(names, {});  // the work gets the tensors, and has the copy of a gradient by these alone
  return postpone(
      parameter, others_of(from.tensor, parts),
      [names, update, home = from.home](const std::vector<at::Tensor>& tensors, bool has_parameter) {
        std::vector<Part> taken = names;
        set_states(taken, at::TensorList(tensors).slice(2));
        update_now(tensors[0], tensors[1], taken, update, has_parameter);
      },
      at, reads_parameter ? PostponedWork::TargetUse::kRead : PostponedWork::TargetUse::kWritten);
}

bool update_at_home(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<Part>& parts,
                    const Update& update) {
  if (update.update_on == UpdateOn::kDevice || !can_update_at_home(parameter, gradient, parts)) {
    return false;
  }
  const ManagedCopy from = with_home(parameter, gradient);
  if (!from.tensor.defined()) {
    return false;
  }
  std::vector<at::Tensor> tensors = others_of(from.tensor, parts);
  tensors.insert(tensors.begin(), parameter);
  const std::shared_ptr<const std::vector<at::Tensor>> home = use_at_home(tensors);
  if (home != nullptr) {
    std::vector<Part> taken = parts;
    set_states(taken, at::TensorList(*home).slice(2));
    update_now((*home)[0], (*home)[1], taken, update);
  }
  return home != nullptr;
}

}  // namespace ebb
