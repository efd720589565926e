#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy/policy.h"

namespace ebb {

// The base of every policy that wraps another: holds the inner policy and passes each new step on to it.
class Wrapper : public Policy {
 public:
  void begin_step() override { inner_->begin_step(); }
  void drop_step() override { inner_->drop_step(); }
  [[nodiscard]] bool needs_operation() const override { return inner_->needs_operation(); }
  [[nodiscard]] bool needs_recompute() const override { return inner_->needs_recompute(); }
  [[nodiscard]] std::vector<Matches> matches() const override;

 protected:
  // `name` is the factory's, a literal: for matches(), and for the std::invalid_argument thrown when `inner` is null.
  Wrapper(const char* name, std::shared_ptr<Policy> inner);

  [[nodiscard]] Policy& inner() { return *inner_; }

  // Counts a storage that the policy was asked about, and returns `matched`: whether it is of the kind that the policy
  // looks for.
  bool count(bool matched);

 private:
  const char* const name_;
  const std::shared_ptr<Policy> inner_;
  std::uint64_t asked_ = 0;
  std::uint64_t matched_ = 0;
};

}  // namespace ebb
