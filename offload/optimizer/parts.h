#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "offload/optimizer/update_rule.h"

namespace ebb {

// The states of some rows of a parameter, and their master, by name (OptimizerState::parts).
using Part = std::map<std::string, at::Tensor>;

inline constexpr const char* kMaster = "master";

// The most elements of a part, unless one row has more.
inline constexpr std::int64_t kElementsAtOnce = 1 << 24;

// Rows of a parameter: from `begin` to before `end`.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;

  // These rows of a tensor of the parameter's sizes.
  [[nodiscard]] at::Tensor of(const at::Tensor& tensor) const;
};

// The rows of each part of a parameter.
[[nodiscard]] std::vector<RowRange> row_ranges(const at::Tensor& parameter);

// The type of a parameter's states and master: its own, but float32 for what has a master.
[[nodiscard]] at::ScalarType state_type(const at::Tensor& parameter);

// Whether the part has what an update with these options takes.
[[nodiscard]] bool has_all_states(const Part& part, const at::Tensor& parameter, const UpdateRule& rule,
                                  const torch::optim::OptimizerOptions& options);

// Makes what is missing, beside the parameter: masters of the parameter, and other states of zeros. Returns whether
// there are any such others.
bool add_states(std::vector<Part>& parts, const at::Tensor& parameter, const UpdateRule& rule,
                const torch::optim::OptimizerOptions& options);

// Has a master take the weight's value wherever the master does not round to it: the program has written the weight.
void follow_weight(const at::Tensor& master, const at::Tensor& weight);

void append_tensors(const Part& part, std::vector<at::Tensor>& to);
[[nodiscard]] std::vector<std::string> names_of(const Part& part);

// What append_tensors() of parts with these names has appended from `first` on, as parts.
[[nodiscard]] std::vector<Part> as_parts(const std::vector<at::Tensor>& tensors, std::size_t first,
                                         const std::vector<std::string>& names, std::size_t count);

}  // namespace ebb
