#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/policy/recording_policy.h"

namespace ebb {
namespace {

struct Factory {
  std::string name;
  bool needs_operation;
  bool needs_recompute;
  std::function<std::shared_ptr<Policy>(std::shared_ptr<Policy>)> make;
};

// Each of these passes the first storage of a step, of 0 bytes and made by no operation, on to the inner policy.
Factory any_factory() {
  return GENERATE(
      Factory{"minimum_size", false, false, [](auto inner) { return minimum_size(0, inner); }},
      Factory{"only_operations", true, false, [](auto inner) { return only_operations({""}, inner); }},
      Factory{"except_operations", true, false, [](auto inner) { return except_operations({"AddBackward0"}, inner); }},
      Factory{"recompute", false, true, [](auto inner) { return recompute(Recompute::kComputeBound, inner); }},
      Factory{"callback", true, false,
              [](auto inner) { return callback([](const Candidate&) { return Decision::kOffload; }, inner); }});
}

TEST_CASE("every wrapper passes new and dropped steps on to the policy inside it") {
  const Factory factory = any_factory();
  CAPTURE(factory.name);
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = factory.make(inner);
  policy->begin_step();
  policy->begin_step();
  CHECK(inner->steps == 2);
  policy->drop_step();
  CHECK(inner->dropped == 1);
}

TEST_CASE("no wrapper offloads what the policy inside it keeps") {
  const Factory factory = any_factory();
  CAPTURE(factory.name);
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = factory.make(inner);
  policy->begin_step();
  CHECK(policy->decide(of_size(0)) == Decision::kOffload);
  inner->answer = Decision::kKeep;
  CHECK(policy->decide(of_size(0)) == Decision::kKeep);
  CHECK(inner->asked.size() == 2);
}

TEST_CASE("a wrapper needs the operation if it looks at it or the policy inside it does") {
  const Factory factory = any_factory();
  CAPTURE(factory.name);
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = factory.make(inner);
  CHECK(policy->needs_operation() == factory.needs_operation);
  inner->needs = true;
  CHECK(policy->needs_operation());
}

TEST_CASE("a wrapper needs to know what can be recomputed if it looks at it or the policy inside it does") {
  const Factory factory = any_factory();
  CAPTURE(factory.name);
  const auto inner = std::make_shared<RecordingPolicy>();
  const auto policy = factory.make(inner);
  CHECK(policy->needs_recompute() == factory.needs_recompute);
  inner->recompute_needed = true;
  CHECK(policy->needs_recompute());
}

TEST_CASE("a null inner policy is refused by the factory's name") {
  const Factory factory = any_factory();
  CHECK_THROWS_AS(factory.make(nullptr), std::invalid_argument);
  CHECK_THROWS_WITH(factory.make(nullptr), Catch::StartsWith(factory.name + ": "));
}

TEST_CASE("policies that look for storages of a kind count them, the outermost first") {
  const auto policy =
      recompute(Recompute::kMemoryBound, except_operations({"AddBackward0"}, only_operations({"MulBackward0"})));
  CHECK(policy->matches().empty());
  Candidate candidate = of_size(1);
  candidate.recompute = Recompute::kMemoryBound;
  (void)policy->decide(candidate);
  candidate.recompute = Recompute::kComputeBound;
  candidate.operation = "AddBackward0";
  (void)policy->decide(candidate);
  candidate.operation = "SiluBackward0";
  (void)policy->decide(candidate);
  const std::vector<Matches> found = minimum_size(0, policy)->matches();
  REQUIRE(found.size() == 3);
  const auto check = [](const Matches& each, const std::string& name, std::uint64_t asked, std::uint64_t matched) {
    CHECK(each.policy == name);
    CHECK(each.asked == asked);
    CHECK(each.matched == matched);
  };
  check(found[0], "recompute", 3, 1);
  check(found[1], "except_operations", 2, 1);
  check(found[2], "only_operations", 1, 0);
}

}  // namespace
}  // namespace ebb
