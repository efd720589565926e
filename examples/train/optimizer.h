#pragma once

#include <cstdint>
#include <vector>

#include <torch/optim/adamw.h>

namespace ebb {

// AdamW over these parameters, in two groups: matrices with weight decay, vectors (the norms) without.
torch::optim::AdamW make_optimizer(const std::vector<at::Tensor>& parameters, double weight_decay);

// The learning rate of a step: a linear warm-up to `highest`, then a cosine down to a tenth of it at the last step.
struct Schedule {
  double highest = 0;
  std::int64_t warmup = 0;
  std::int64_t steps = 0;

  [[nodiscard]] double at(std::int64_t step) const;
};

void set_learning_rate(torch::optim::Optimizer& optimizer, double rate);

}  // namespace ebb
