// AdamW and Adam: the operations of LibTorch's, one by one. Fused kernels round differently.

#include <cmath>
#include <stdexcept>
#include <string>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "offload/optimizer/optimizer_with.h"

namespace ebb {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerOptions;

template <typename Options>
void check(const OptimizerOptions& given, const std::string& name) {
  const auto* options = dynamic_cast<const Options*>(&given);
  if (options == nullptr) {
    throw std::invalid_argument("ebb: " + name + " got options of another optimizer");
  }
  const auto [beta1, beta2] = options->betas();
  const auto is_share = [](double beta) { return beta >= 0 && beta < 1; };
  if (!(options->lr() >= 0) || !(options->eps() >= 0) || !(options->weight_decay() >= 0) || !is_share(beta1) ||
      !is_share(beta2)) {
    throw std::invalid_argument("ebb: " + name + " needs lr, eps and weight_decay of at least 0, and betas in [0, 1)");
  }
}

template <typename Options>
void update_by_moments(const RowUpdate& rows, const at::Tensor& gradient, const Options& options) {
  const auto [beta1, beta2] = options.betas();
  const double correction1 = 1 - std::pow(beta1, rows.step);
  const double correction2 = 1 - std::pow(beta2, rows.step);
  const at::Tensor& first = rows.states.at("exp_avg");
  const at::Tensor& second = rows.states.at("exp_avg_sq");
  first.mul_(beta1).add_(gradient, 1 - beta1);
  second.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  at::Tensor largest = second;
  if (options.amsgrad()) {
    largest = rows.states.at("max_exp_avg_sq");
    at::maximum_out(largest, second, largest);
  }
  const at::Tensor divisor = largest.sqrt().div_(std::sqrt(correction2)).add_(options.eps());
  rows.target.addcdiv_(first, divisor, -options.lr() / correction1);
}

void update_adamw(const RowUpdate& rows, const OptimizerOptions& given) {
  const auto& options = static_cast<const AdamWOptions&>(given);
  if (options.weight_decay() != 0) {
    rows.target.mul_(1 - options.lr() * options.weight_decay());
  }
  update_by_moments(rows, rows.gradient, options);
}

void update_adam(const RowUpdate& rows, const OptimizerOptions& given) {
  const auto& options = static_cast<const AdamOptions&>(given);
  const bool decays = options.weight_decay() != 0;
  update_by_moments(rows, decays ? rows.gradient.add(rows.target, options.weight_decay()) : rows.gradient, options);
}

// The kernel takes lists, here of one tensor each.
template <typename Kernel, typename Options>
void update_fused(const RowUpdate& rows, const OptimizerOptions& given) {
  const auto& options = static_cast<const Options&>(given);
  const auto [beta1, beta2] = options.betas();
  std::vector<at::Tensor> largest;
  if (options.amsgrad()) {
    largest.push_back(rows.states.at("max_exp_avg_sq"));
  }
  const at::Tensor step = at::scalar_tensor(static_cast<double>(rows.step), at::kFloat);
  Kernel::call({rows.target}, {rows.gradient}, {rows.states.at("exp_avg")}, {rows.states.at("exp_avg_sq")}, largest,
               {step}, options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(),
               /*maximize=*/false, {}, {});
}

template <typename Options>
std::vector<StateRule> states() {
  return {{"exp_avg", nullptr}, {"exp_avg_sq", nullptr}, {"max_exp_avg_sq", [](const OptimizerOptions& options) {
                                                            return static_cast<const Options&>(options).amsgrad();
                                                          }}};
}

}  // namespace

template <>
const UpdateRule& rule_of<AdamWOptions>() {
  static const UpdateRule rule{"AdamW",
                               states<AdamWOptions>(),
                               [](const OptimizerOptions& options) { check<AdamWOptions>(options, "AdamW"); },
                               nullptr,  // the weight decay goes into the parameter alone
                               &update_adamw,
                               &update_fused<at::_ops::_fused_adamw_, AdamWOptions>};
  return rule;
}

template <>
const UpdateRule& rule_of<AdamOptions>() {
  static const UpdateRule rule{
      "Adam",
      states<AdamOptions>(),
      [](const OptimizerOptions& options) { check<AdamOptions>(options, "Adam"); },
      [](const OptimizerOptions& options) { return static_cast<const AdamOptions&>(options).weight_decay() != 0; },
      &update_adam,
      &update_fused<at::_ops::_fused_adam_, AdamOptions>};
  return rule;
}

template class OptimizerWith<AdamWOptions>;
template class OptimizerWith<AdamOptions>;

}  // namespace ebb
