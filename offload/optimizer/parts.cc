#include "offload/optimizer/parts.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "offload/managed/manage.h"
#include "offload/managed/uses.h"

namespace ebb {
namespace {

bool needs_master(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf;
}

}  // namespace

at::Tensor RowRange::of(const at::Tensor& tensor) const {
  const bool is_whole = tensor.dim() == 0 || (begin == 0 && end == tensor.size(0));
  return is_whole ? tensor : tensor.slice(0, begin, end);
}

std::vector<RowRange> row_ranges(const at::Tensor& parameter, std::int64_t elements_at_once) {
  const std::int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
  if (parameter.numel() <= elements_at_once || parameter.key_set().has(c10::DispatchKey::Python)) {
    return {{0, rows}};
  }
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, elements_at_once / (parameter.numel() / rows));
  std::vector<RowRange> parts;
  for (std::int64_t begin = 0; begin < rows; begin += rows_at_once) {
    parts.push_back({begin, std::min(begin + rows_at_once, rows)});
  }
  return parts;
}

bool has_all_states(const Part& part, const at::Tensor& parameter, const UpdateRule& rule) {
  return (!needs_master(parameter) || part.contains(kMaster)) &&
         std::ranges::all_of(rule.states(), [&](const std::string& name) { return part.contains(name); });
}

bool add_states(std::vector<Part>& parts, const at::Tensor& parameter, const UpdateRule& rule,
                std::int64_t elements_at_once) {
  const std::vector<RowRange> ranges = row_ranges(parameter, elements_at_once);
  parts.resize(ranges.size());
  bool has_new_states = false;
  const c10::InferenceMode no_inference(false);  // states of the first step are written in later ones
  const at::NoGradGuard no_grad;
  const at::TensorOptions kind = needs_master(parameter) ? at::TensorOptions(at::kFloat) : at::TensorOptions();
  const Uses all_parts(at::TensorList{needs_master(parameter) ? parameter : at::Tensor()});
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor rows = ranges[i].of(parameter.detach());
    const auto add = [&](const std::string& name, at::Tensor made) {
      manage_beside(parameter, made);
      parts[i].emplace(name, std::move(made));
    };
    if (needs_master(parameter) && !parts[i].contains(kMaster)) {
      add(kMaster, rows.to(at::kFloat));
    }
    for (const std::string& name : rule.states()) {
      if (!parts[i].contains(name)) {
        add(name, at::zeros_like(rows, kind, at::MemoryFormat::Preserve));
        has_new_states = true;
      }
    }
  }
  return has_new_states;
}

std::vector<Part> place_states(const at::Tensor& parameter, const Part& whole, std::int64_t elements_at_once) {
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  std::vector<Part> parts;
  for (const RowRange& range : row_ranges(parameter, elements_at_once)) {
    Part& part = parts.emplace_back();
    for (const auto& [name, from] : whole) {
      TORCH_CHECK(from.sizes() == parameter.sizes(), "ebb: ", name, " of an archive has the sizes ", from.sizes(),
                  ", and its parameter ", parameter.sizes());
      const at::ScalarType type = needs_master(parameter) ? at::kFloat : parameter.scalar_type();
      at::Tensor placed = range.of(from).to(from.options().device(parameter.device()).dtype(type),
                                            /*non_blocking=*/false, /*copy=*/true);
      manage_beside(parameter, placed);
      part.emplace(name, std::move(placed));
    }
  }
  return parts;
}

}  // namespace ebb
