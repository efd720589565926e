#include "policy/policies.h"

#include <catch2/catch.hpp>

#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

TEST_CASE("a storage of just the minimum size is offloaded, one byte less is kept") {
  const auto policy = minimum_size(1000);
  policy->begin_step();
  CHECK(policy->decide(of_size(999)) == Decision::kKeep);
  CHECK(policy->decide(of_size(1000)) == Decision::kOffload);
}

TEST_CASE("the minimum size is 1 MiB unless said otherwise") {
  const auto policy = minimum_size();
  policy->begin_step();
  CHECK(policy->decide(of_size((1 << 20) - 1)) == Decision::kKeep);
  CHECK(policy->decide(of_size(1 << 20)) == Decision::kOffload);
}

TEST_CASE("the minimum size needs no asking, unless another policy is around it that counts") {
  CHECK(minimum_size(1000)->least_bytes() == 1000);
  CHECK(minimum_size(1000, except_operations({"SiluBackward0"}))->least_bytes() == 1000);
  CHECK(except_operations({"SiluBackward0"}, minimum_size(1000))->least_bytes() == 0);
}

TEST_CASE("a storage that is too small is not shown to the inner policy") {
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = minimum_size(10, inner);
  policy->begin_step();
  for (const std::uint64_t bytes : {5, 10, 9, 11}) {
    (void)policy->decide(of_size(bytes));
  }
  CHECK(inner->asked == std::vector<std::uint64_t>{10, 11});
}

TEST_CASE("wrapped policies each keep what they have a reason to keep") {
  const auto large_ones = [](const Candidate& candidate) {
    return candidate.bytes < 40 ? Decision::kKeep : Decision::kOffload;
  };
  const auto policy = minimum_size(10, except_operations({"SiluBackward0"}, callback(large_ones)));
  policy->begin_step();
  std::vector<Decision> decisions;
  for (const std::uint64_t bytes : {5, 100, 20, 30, 40, 50}) {
    Candidate candidate = of_size(bytes);
    candidate.operation = bytes == 100 ? "SiluBackward0" : "MmBackward0";
    decisions.push_back(policy->decide(candidate));
  }
  const auto keep = Decision::kKeep;
  const auto offload = Decision::kOffload;
  CHECK(decisions == std::vector<Decision>{keep, keep, keep, keep, offload, offload});
}

}  // namespace
TEST_CASE("a negative minimum size is an error and does not keep everything") {
  CHECK_THROWS_WITH(minimum_size(static_cast<std::uint64_t>(-1)), Catch::Contains("-1 bytes"));
}

}  // namespace ebb
