#include "policy/policies.h"

#include <memory>

#include <catch2/catch.hpp>

#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

Decision decided(Recompute dearest, Recompute candidates) {
  const auto policy = recompute(dearest, std::make_shared<RecordingPolicy>());
  Candidate candidate = of_size(1);
  candidate.recompute = candidates;
  return policy->decide(candidate);
}

TEST_CASE("what costs no more than the dearest is recomputed, the rest goes to the inner policy") {
  CHECK(decided(Recompute::kComputeBound, Recompute::kComputeBound) == Decision::kRecompute);
  CHECK(decided(Recompute::kComputeBound, Recompute::kMemoryBound) == Decision::kRecompute);
  CHECK(decided(Recompute::kComputeBound, Recompute::kNo) == Decision::kOffload);
  CHECK(decided(Recompute::kMemoryBound, Recompute::kComputeBound) == Decision::kOffload);
  CHECK(decided(Recompute::kMemoryBound, Recompute::kMemoryBound) == Decision::kRecompute);
  CHECK(decided(Recompute::kNo, Recompute::kMemoryBound) == Decision::kOffload);
}

}  // namespace
}  // namespace ebb
