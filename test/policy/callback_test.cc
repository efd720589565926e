#include "policy/policies.h"

#include <stdexcept>

#include <catch2/catch.hpp>

#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

TEST_CASE("the function sees the candidate, and only what it lets go reaches the inner policy") {
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = callback(
      [](const Candidate& candidate) {
        return candidate.ordinal == 7 && candidate.operation == "MulBackward0" ? Decision::kOffload : Decision::kKeep;
      },
      inner);
  policy->begin_step();
  CHECK(policy->decide({.bytes = 1, .ordinal = 7, .operation = "MulBackward0"}) == Decision::kOffload);
  CHECK(policy->decide({.bytes = 2, .ordinal = 8, .operation = "MulBackward0"}) == Decision::kKeep);
  CHECK(policy->decide({.bytes = 3, .ordinal = 7, .operation = "MmBackward0"}) == Decision::kKeep);
  CHECK(inner->asked == std::vector<std::uint64_t>{1});
}

TEST_CASE("what the function throws reaches the caller") {
  const auto policy = callback([](const Candidate&) -> Decision { throw std::domain_error("odd"); });
  CHECK_THROWS_AS(policy->decide(of_size(1)), std::domain_error);
}

TEST_CASE("an empty function is refused") { CHECK_THROWS_AS(callback(nullptr), std::invalid_argument); }

}  // namespace
}  // namespace ebb
