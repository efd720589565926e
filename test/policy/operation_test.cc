#include "policy/policies.h"

#include <catch2/catch.hpp>

#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

TEST_CASE("only what the named operations made is offloaded") {
  const auto policy = only_operations({"SiluBackward0", "MmBackward0"});
  policy->begin_step();
  CHECK(policy->decide(made_by("SiluBackward0")) == Decision::kOffload);
  CHECK(policy->decide(made_by("MmBackward0")) == Decision::kOffload);
  CHECK(policy->decide(made_by("MmBackward01")) == Decision::kKeep);
  CHECK(policy->decide(made_by("Mm")) == Decision::kKeep);
  CHECK(policy->decide(made_by("")) == Decision::kKeep);
}

TEST_CASE("what the excepted operations made is kept and nothing else") {
  const auto policy = except_operations({"SiluBackward0", "MmBackward0"});
  policy->begin_step();
  CHECK(policy->decide(made_by("SiluBackward0")) == Decision::kKeep);
  CHECK(policy->decide(made_by("MmBackward0")) == Decision::kKeep);
  CHECK(policy->decide(made_by("MmBackward01")) == Decision::kOffload);
  CHECK(policy->decide(made_by("")) == Decision::kOffload);
}

}  // namespace
}  // namespace ebb
