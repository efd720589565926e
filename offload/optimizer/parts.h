#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/optimizer/update_rule.h"

namespace ebb {

// The states of some rows of a parameter, and their master, by name (OptimizerState::parts).
using Part = std::map<std::string, at::Tensor>;

inline constexpr const char* kMaster = "master";

// The most elements of a part, unless one row has more: where the caller does not say another number.
inline constexpr std::int64_t kElementsAtOnce = 1 << 24;

// Rows of a parameter: from `begin` to before `end`.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;

  // These rows of a tensor of the parameter's sizes.
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor) const;
};

// The rows of each part of a parameter, with at most so many elements, or one row. A tensor of a subclass with
// operations of its own is one part: its rows need not be views (a DTensor's are copies).
[[nodiscard]] std::vector<RowRange> row_ranges(const at::Tensor& parameter, std::int64_t elements_at_once);

// Whether the part has what an update takes.
[[nodiscard]] bool has_all_states(const Part& part, const at::Tensor& parameter, const UpdateRule& rule);

// Makes what is missing, beside the parameter: masters of the parameter, and other states of zeros. Returns whether
// there are any such others.
bool add_states(std::vector<Part>& parts, const at::Tensor& parameter, const UpdateRule& rule,
                std::int64_t elements_at_once);

// Copies of states of all rows, beside the parameter. Throws c10::Error where one has other sizes than the parameter.
[[nodiscard]] std::vector<Part> place_states(const at::Tensor& parameter, const Part& whole,
                                             std::int64_t elements_at_once);

}  // namespace ebb
