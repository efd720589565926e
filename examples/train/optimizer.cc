#include "examples/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <utility>

namespace ebb {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kFinalFraction = 0.1;

}  // namespace

torch::optim::AdamW make_optimizer(const std::vector<at::Tensor>& parameters, double weight_decay) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> vectors;
  for (const auto& parameter : parameters) {
    (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  }
  const auto options = [](double decay) {
    return torch::optim::AdamWOptions().betas({kBeta1, kBeta2}).weight_decay(decay);
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), std::make_unique<torch::optim::AdamWOptions>(options(weight_decay)));
  groups.emplace_back(std::move(vectors), std::make_unique<torch::optim::AdamWOptions>(options(0.0)));
  return torch::optim::AdamW(groups, options(weight_decay));
}

double Schedule::at(std::int64_t step) const {
  if (step < warmup) {
    return highest * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const auto span = static_cast<double>(std::max<std::int64_t>(steps - warmup, 1));
  const double done = std::min(1.0, static_cast<double>(step - warmup) / span);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return highest * (kFinalFraction + (1.0 - kFinalFraction) * cosine);
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(rate);
  }
}

}  // namespace ebb
