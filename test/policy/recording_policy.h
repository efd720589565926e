#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "policy/policy.h"

namespace ebb {

// An inner policy that notes what reaches it.
class RecordingPolicy final : public Policy {
 public:
  void begin_step() override { ++steps; }
  void drop_step() override { ++dropped; }
  [[nodiscard]] Decision decide(const Candidate& candidate) override {
    asked.push_back(candidate.bytes);
    return answer;
  }
  [[nodiscard]] bool needs_operation() const override { return needs; }

  [[nodiscard]] bool needs_recompute() const override { return recompute_needed; }

  int steps = 0;
  int dropped = 0;
  std::vector<std::uint64_t> asked;
  Decision answer = Decision::kOffload;
  bool needs = false;
  bool recompute_needed = false;
};

inline Candidate of_size(std::uint64_t bytes) {
  Candidate candidate;
  candidate.bytes = bytes;
  return candidate;
}

inline Candidate made_by(std::string_view operation) {
  Candidate candidate;
  candidate.operation = operation;
  return candidate;
}

}  // namespace ebb
