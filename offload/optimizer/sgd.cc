// SGD with momentum: the operations of LibTorch's, one by one.

#include <stdexcept>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include "offload/optimizer/update_rule.h"

namespace ebb {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::SGDOptions;

class SgdRule final : public UpdateRule {
 public:
  explicit SgdRule(const SgdNumbers& numbers) : numbers_(numbers) {}

  [[nodiscard]] const char* name() const override { return "SGD"; }

  void check() const override {
    if (!(numbers_.lr >= 0) || !(numbers_.momentum >= 0) || !(numbers_.weight_decay >= 0)) {
      throw std::invalid_argument("ebb: SGD needs lr, momentum and weight_decay of at least 0");
    }
    if (numbers_.nesterov && (numbers_.momentum == 0 || numbers_.dampening != 0)) {
      throw std::invalid_argument("ebb: SGD with nesterov needs momentum, and no dampening");
    }
  }

  [[nodiscard]] std::vector<std::string> states() const override {
    return numbers_.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>();
  }

  [[nodiscard]] bool do_states_take_target() const override { return numbers_.weight_decay != 0; }

  void update(const RowUpdate& rows) const override {
    at::Tensor direction = numbers_.maximize ? -rows.gradient : rows.gradient;
    if (numbers_.weight_decay != 0) {
      direction = direction.add(rows.target, numbers_.weight_decay);
    }
    if (numbers_.momentum != 0) {
      const at::Tensor& buffer = rows.states.at("momentum_buffer");
      if (rows.has_new_states) {
        buffer.copy_(direction);
      } else {
        buffer.mul_(numbers_.momentum).add_(direction, 1 - numbers_.dampening);
      }
      direction = numbers_.nesterov ? direction.add(buffer, numbers_.momentum) : buffer;
    }
    rows.target.add_(direction, -numbers_.lr);
  }

  void update_fused(const RowUpdate& rows) const override {
    std::vector<at::Tensor> buffers;
    if (numbers_.momentum != 0) {
      buffers.push_back(rows.states.at("momentum_buffer"));
    }
    at::_fused_sgd_({rows.target}, {rows.gradient}, buffers, numbers_.weight_decay, numbers_.momentum, numbers_.lr,
                    numbers_.dampening, numbers_.nesterov, numbers_.maximize, rows.has_new_states, {}, {});
  }

 private:
  const SgdNumbers numbers_;
};

}  // namespace

std::shared_ptr<UpdateRule> sgd_rule(const SgdNumbers& numbers) { return std::make_shared<SgdRule>(numbers); }

template <>
std::shared_ptr<UpdateRule> rule_of<SGDOptions>(const OptimizerOptions& given, std::int64_t /*step*/) {
  const auto& options = options_as<SGDOptions>(given, "SGD");
  return sgd_rule({.lr = options.lr(),
                   .momentum = options.momentum(),
                   .dampening = options.dampening(),
                   .weight_decay = options.weight_decay(),
                   .nesterov = options.nesterov(),
                   .maximize = false});
}

}  // namespace ebb
