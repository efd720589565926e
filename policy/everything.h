#pragma once

#include <cstdint>
#include <memory>

#include "policy/policy.h"

namespace ebb {

// Offloads every storage. The other policies wrap this policy by default.
class Everything final : public Policy {
 public:
  void begin_step() override {}
  [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return Decision::kOffload; }
  [[nodiscard]] bool needs_operation() const override { return false; }
};

[[nodiscard]] std::shared_ptr<Policy> offload_everything();

// Keeps every storage, so bytes move only by eviction when the device has no memory left
// (Options::evict_when_out_of_memory).
class KeepEverything final : public Policy {
 public:
  explicit KeepEverything(std::uint64_t least_bytes) : least_bytes_(least_bytes) {}
  void begin_step() override {}
  [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return Decision::kKeep; }
  [[nodiscard]] bool needs_operation() const override { return false; }
  [[nodiscard]] std::uint64_t least_bytes() const override { return least_bytes_; }

 private:
  const std::uint64_t least_bytes_;
};

// Storages of fewer than `least_bytes` are not evicted either.
[[nodiscard]] std::shared_ptr<Policy> keep_everything(std::uint64_t least_bytes = std::uint64_t{1} << 20);

}  // namespace ebb
