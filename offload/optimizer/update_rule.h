#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ebb {

// Some rows of a parameter, and what their update takes.
struct RowUpdate {
  at::Tensor target;    // the rows, or their master
  at::Tensor gradient;  // in the target's type, but for update_fused()
  const std::map<std::string, at::Tensor>& states;
  bool has_new_states;  // which are zero
};

// How one update changes a parameter, with the options that hold for this update.
//
// Threads: any.
class UpdateRule {
 public:
  UpdateRule() = default;
  virtual ~UpdateRule() = default;
  UpdateRule(const UpdateRule&) = delete;
  UpdateRule& operator=(const UpdateRule&) = delete;

  [[nodiscard]] virtual const char* name() const = 0;  // of the optimizer

  // Throws std::invalid_argument where an option is out of its range.
  virtual void check() const = 0;

  // The names of the states that the update takes.
  [[nodiscard]] virtual std::vector<std::string> states() const = 0;

  // Whether the states after the update depend on the target before.
  [[nodiscard]] virtual bool do_states_take_target() const = 0;

  virtual void update(const RowUpdate& rows) const = 0;

  // As update(), on the CPU, by LibTorch's fused kernels, which round differently.
  virtual void update_fused(const RowUpdate& rows) const = 0;
};

// The language of the LibTorch optimizer whose operations an update has. Results round differently.
enum class Language : std::uint8_t { kCpp, kPython };

// The options of one update of Adam, and the factors that LibTorch's optimizer computes of them. In Python an option
// may be a tensor, and then the arithmetic is that of the tensor's type: so the caller computes the factors.
struct AdamNumbers {
  Language language;
  bool is_decoupled;  // AdamW
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool amsgrad;
  bool maximize;
  double step;         // from 1
  double kept;         // 1 - lr * weight_decay
  double weight1;      // 1 - beta1
  double weight2;      // 1 - beta2
  double step_size;    // lr / (1 - beta1^step)
  double correction2;  // sqrt(1 - beta2^step)
};
[[nodiscard]] std::shared_ptr<UpdateRule> adam_rule(const AdamNumbers& numbers);

// The options of one update of SGD. The operations are the same in both languages.
struct SgdNumbers {
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
};
[[nodiscard]] std::shared_ptr<UpdateRule> sgd_rule(const SgdNumbers& numbers);

// Options of the class that the optimizer of this name has.
template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options, const std::string& name) {
  const auto* known = dynamic_cast<const Options*>(&options);
  if (known == nullptr) {
    throw std::invalid_argument("ebb: " + name + " got options of another optimizer");
  }
  return *known;
}

// The rule of LibTorch's C++ optimizer with these options. `step`: from 1. Throws std::invalid_argument for another
// optimizer's options.
template <typename Options>
[[nodiscard]] std::shared_ptr<UpdateRule> rule_of(const torch::optim::OptimizerOptions& options, std::int64_t step);

}  // namespace ebb
