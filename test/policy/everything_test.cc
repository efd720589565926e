#include "policy/policies.h"

#include <catch2/catch.hpp>

#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

TEST_CASE("everything is offloaded, whatever its size, without asking for names") {
  const auto policy = offload_everything();
  policy->begin_step();
  CHECK(policy->decide(of_size(0)) == Decision::kOffload);
  CHECK(policy->decide(of_size(UINT64_MAX)) == Decision::kOffload);
  CHECK_FALSE(policy->needs_operation());
}

}  // namespace
}  // namespace ebb
