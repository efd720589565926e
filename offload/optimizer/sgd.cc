// SGD with momentum: the operations of LibTorch's, one by one.

#include <stdexcept>

#include <ATen/Functions.h>

#include "offload/optimizer/optimizer_with.h"

namespace ebb {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::SGDOptions;

void check(const OptimizerOptions& given) {
  const auto* options = dynamic_cast<const SGDOptions*>(&given);
  if (options == nullptr) {
    throw std::invalid_argument("ebb: SGD got options of another optimizer");
  }
  if (!(options->lr() >= 0) || !(options->momentum() >= 0) || !(options->weight_decay() >= 0)) {
    throw std::invalid_argument("ebb: SGD needs lr, momentum and weight_decay of at least 0");
  }
  if (options->nesterov() && (options->momentum() == 0 || options->dampening() != 0)) {
    throw std::invalid_argument("ebb: SGD with nesterov needs momentum, and no dampening");
  }
}

void update(const RowUpdate& rows, const OptimizerOptions& given) {
  const auto& options = static_cast<const SGDOptions&>(given);
  at::Tensor direction = rows.gradient;
  if (options.weight_decay() != 0) {
    direction = direction.add(rows.target, options.weight_decay());
  }
  if (options.momentum() != 0) {
    const at::Tensor& buffer = rows.states.at("momentum_buffer");
    if (rows.has_new_states) {
      buffer.copy_(direction);
    } else {
      buffer.mul_(options.momentum()).add_(direction, 1 - options.dampening());
    }
    direction = options.nesterov() ? direction.add(buffer, options.momentum()) : buffer;
  }
  rows.target.add_(direction, -options.lr());
}

void update_fused(const RowUpdate& rows, const OptimizerOptions& given) {
  const auto& options = static_cast<const SGDOptions&>(given);
  std::vector<at::Tensor> buffers;
  if (options.momentum() != 0) {
    buffers.push_back(rows.states.at("momentum_buffer"));
  }
  at::_fused_sgd_({rows.target}, {rows.gradient}, buffers, options.weight_decay(), options.momentum(), options.lr(),
                  options.dampening(), options.nesterov(), /*maximize=*/false, rows.has_new_states, {}, {});
}

}  // namespace

template <>
const UpdateRule& rule_of<SGDOptions>() {
  static const UpdateRule rule{
      "SGD",
      {{"momentum_buffer",
        [](const OptimizerOptions& options) { return static_cast<const SGDOptions&>(options).momentum() != 0; }}},
      &check,
      [](const OptimizerOptions& options) { return static_cast<const SGDOptions&>(options).weight_decay() != 0; },
      &update,
      &update_fused};
  return rule;
}

template class OptimizerWith<SGDOptions>;

}  // namespace ebb
