#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ebb {

// One update of a parameter's rows.
struct RowUpdate {
  at::Tensor target;    // the rows, or their master
  at::Tensor gradient;  // in the target's type, but for update_on_cpu()
  const std::map<std::string, at::Tensor>& states;
  std::int64_t step;    // from 1
  bool has_new_states;  // which are zero
};

// A state that an optimizer keeps of each parameter.
struct StateRule {
  std::string name;
  bool (*is_wanted)(const torch::optim::OptimizerOptions& options);  // null: always
};

// How an optimizer updates parameters. `options` are those of the optimizer's class.
struct UpdateRule {
  std::string name;
  std::vector<StateRule> states;
  void (*check)(const torch::optim::OptimizerOptions& options);  // throws std::invalid_argument

  // Whether the states after an update depend on the target before; null: never.
  bool (*do_states_take_target)(const torch::optim::OptimizerOptions& options);

  void (*update)(const RowUpdate& rows, const torch::optim::OptimizerOptions& options);

  // As `update`, on the CPU, by LibTorch's fused kernels, which round differently.
  void (*update_fused)(const RowUpdate& rows, const torch::optim::OptimizerOptions& options);
};

// The rule of LibTorch's optimizer with these options.
template <typename Options>
const UpdateRule& rule_of();

}  // namespace ebb
