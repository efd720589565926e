#pragma once

#include <memory>

#include "policy/policy.h"

namespace ebb {

// Offloads every storage: what the other policies wrap by default.
class Everything final : public Policy {
 public:
  void begin_step() override {}
  [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return Decision::kOffload; }
  [[nodiscard]] bool needs_operation() const override { return false; }
};

[[nodiscard]] std::shared_ptr<Policy> offload_everything();

}  // namespace ebb
