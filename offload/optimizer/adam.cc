// AdamW and Adam: the operations of LibTorch's, one by one.

#include <cmath>
#include <stdexcept>
#include <string>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "offload/optimizer/update_rule.h"

namespace ebb {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerOptions;

class AdamRule final : public UpdateRule {
 public:
  explicit AdamRule(const AdamNumbers& numbers) : numbers_(numbers) {}

  [[nodiscard]] const char* name() const override { return numbers_.is_decoupled ? "AdamW" : "Adam"; }

  void check() const override {
    const auto is_share = [](double beta) { return beta >= 0 && beta < 1; };
    if (!(numbers_.lr >= 0) || !(numbers_.eps >= 0) || !(numbers_.weight_decay >= 0) || !is_share(numbers_.beta1) ||
        !is_share(numbers_.beta2)) {
      throw std::invalid_argument("ebb: " + std::string(name()) +
                                  " needs lr, eps and weight_decay of at least 0, and betas in [0, 1)");
    }
  }

  [[nodiscard]] std::vector<std::string> states() const override {
    std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
    if (numbers_.amsgrad) {
      names.emplace_back("max_exp_avg_sq");
    }
    return names;
  }

  [[nodiscard]] bool do_states_take_target() const override {
    return !numbers_.is_decoupled && numbers_.weight_decay != 0;
  }

  void update(const RowUpdate& rows) const override {
    at::Tensor gradient = numbers_.maximize ? -rows.gradient : rows.gradient;
    if (numbers_.weight_decay != 0 && numbers_.is_decoupled) {
      rows.target.mul_(numbers_.kept);
    } else if (numbers_.weight_decay != 0) {
      gradient = gradient.add(rows.target, numbers_.weight_decay);
    }
    gradient = as_real(gradient);
    const at::Tensor first = as_real(rows.states.at("exp_avg"));
    const at::Tensor second = as_real(rows.states.at("exp_avg_sq"));
    if (numbers_.language == Language::kPython) {
      first.lerp_(gradient, numbers_.weight1);
    } else {
      first.mul_(numbers_.beta1).add_(gradient, numbers_.weight1);
    }
    second.mul_(numbers_.beta2).addcmul_(gradient, gradient, numbers_.weight2);
    at::Tensor largest = second;
    if (numbers_.amsgrad) {
      largest = as_real(rows.states.at("max_exp_avg_sq"));
      at::maximum_out(largest, second, largest);
    }
    const at::Tensor divisor = largest.sqrt().div_(numbers_.correction2).add_(numbers_.eps);
    as_real(rows.target).addcdiv_(first, divisor, -numbers_.step_size);
  }

  // The kernels take lists, here of one tensor each.
  void update_fused(const RowUpdate& rows) const override {
    std::vector<at::Tensor> largest;
    if (numbers_.amsgrad) {
      largest.push_back(rows.states.at("max_exp_avg_sq"));
    }
    const auto call = [&](const auto& kernel) {
      kernel({rows.target}, {rows.gradient}, {rows.states.at("exp_avg")}, {rows.states.at("exp_avg_sq")}, largest,
             {at::scalar_tensor(numbers_.step, at::kFloat)}, numbers_.lr, numbers_.beta1, numbers_.beta2,
             numbers_.weight_decay, numbers_.eps, numbers_.amsgrad, numbers_.maximize, {}, {});
    };
    if (numbers_.is_decoupled) {
      call(&at::_ops::_fused_adamw_::call);
    } else {
      call(&at::_ops::_fused_adam_::call);
    }
  }

 private:
  // The optimizer of C++ has no such view.
  [[nodiscard]] at::Tensor as_real(const at::Tensor& tensor) const {
    return numbers_.language == Language::kPython && tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  }

  const AdamNumbers numbers_;
};

template <typename Options>
std::shared_ptr<UpdateRule> rule(const OptimizerOptions& given, std::int64_t step, bool is_decoupled) {
  const auto& options = options_as<Options>(given, is_decoupled ? "AdamW" : "Adam");
  const auto [beta1, beta2] = options.betas();
  const double lr = options.lr();
  return adam_rule({.language = Language::kCpp,
                    .is_decoupled = is_decoupled,
                    .lr = lr,
                    .beta1 = beta1,
                    .beta2 = beta2,
                    .eps = options.eps(),
                    .weight_decay = options.weight_decay(),
                    .amsgrad = options.amsgrad(),
                    .maximize = false,
                    .step = static_cast<double>(step),
                    .kept = 1 - lr * options.weight_decay(),
                    .weight1 = 1 - beta1,
                    .weight2 = 1 - beta2,
                    .step_size = lr / (1 - std::pow(beta1, step)),
                    .correction2 = std::sqrt(1 - std::pow(beta2, step))});
}

}  // namespace

std::shared_ptr<UpdateRule> adam_rule(const AdamNumbers& numbers) { return std::make_shared<AdamRule>(numbers); }

template <>
std::shared_ptr<UpdateRule> rule_of<AdamWOptions>(const OptimizerOptions& options, std::int64_t step) {
  return rule<AdamWOptions>(options, step, /*is_decoupled=*/true);
}

template <>
std::shared_ptr<UpdateRule> rule_of<AdamOptions>(const OptimizerOptions& options, std::int64_t step) {
  return rule<AdamOptions>(options, step, /*is_decoupled=*/false);
}

}  // namespace ebb
