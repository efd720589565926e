#pragma once

#include <memory>

#include "policy/policy.h"

namespace ebb {

// What every policy that wraps another has in common: the policy inside it, which hears of each new step.
class Wrapper : public Policy {
 public:
  void begin_step() override { inner_->begin_step(); }
  void drop_step() override { inner_->drop_step(); }
  [[nodiscard]] bool needs_operation() const override { return inner_->needs_operation(); }
  [[nodiscard]] bool needs_recompute() const override { return inner_->needs_recompute(); }

 protected:
  // `name` is the factory's, for the std::invalid_argument thrown when `inner` is null.
  Wrapper(const char* name, std::shared_ptr<Policy> inner);

  [[nodiscard]] Policy& inner() { return *inner_; }

 private:
  const std::shared_ptr<Policy> inner_;
};

}  // namespace ebb
