#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "offload/optimizer.h"
#include "offload/optimizer/update_rule.h"

namespace ebb {

// Options of the class that the optimizer of this name has.
template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options, const std::string& name) {
  const auto* known = dynamic_cast<const Options*>(&options);
  if (known == nullptr) {
    throw std::invalid_argument("ebb: " + name + " got options of another optimizer");
  }
  return *known;
}

template <typename Options>
OptimizerWith<Options>::OptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults,
                                      UpdateIn update_in, UpdateOn update_on)
    : Optimizer(&rule_of<Options>, groups, std::make_unique<Options>(std::move(defaults)), update_in, update_on) {}

template <typename Options>
OptimizerWith<Options>::OptimizerWith(std::vector<at::Tensor> parameters, Options defaults, UpdateIn update_in,
                                      UpdateOn update_on)
    : OptimizerWith({torch::optim::OptimizerParamGroup(std::move(parameters))}, std::move(defaults), update_in,
                    update_on) {}

template <typename Options>
void OptimizerWith<Options>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<OptimizerState, Options>(archive, *this);
}

template <typename Options>
void OptimizerWith<Options>::load(torch::serialize::InputArchive& archive) {
  load_by([&] { torch::optim::serialize<OptimizerState, Options>(archive, *this); });
}

}  // namespace ebb
