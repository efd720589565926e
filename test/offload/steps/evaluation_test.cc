// Forward passes that no backward follows.

#include <array>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr std::uint64_t kFloat = sizeof(float);

at::Tensor network(Inputs& in, std::int64_t floats) {
  at::Tensor x = in.activation({floats});
  for (int i = 0; i < 50; ++i) {
    x = x.sin();
  }
  return x.sum();
}

void evaluate(std::int64_t floats) {
  Inputs in;
  network(in, floats);
}

void train_step(std::int64_t floats) {
  Inputs in;
  network(in, floats).backward();
}

using Bounds = std::array<std::uint64_t, 2>;  // of stash and window

Bounds bounds(const Rig& rig) {
  const Stats stats = rig.stats();
  return {stats.stash.capacity_bytes, stats.window.capacity_bytes};
}

constexpr Bounds kOfStep{50 * 100 * kFloat / 12, 50 * 100 * kFloat / 12};  // a twelfth of what it saves

TEST_CASE_METHOD(NoLeak, "the chosen bounds are those of the last step, however often and much is evaluated between") {
  const bool one_guard = GENERATE(false, true);
  Setting setting = late();
  setting.schedule = Schedule::kEarly;  // or steps would wait for copies, and the window be twice as large
  Rig rig(setting);
  const auto around = one_guard ? std::make_unique<OffloadGuard>(rig.offloader()) : nullptr;
  for (int epoch = 0; epoch < 3; ++epoch) {
    INFO("epoch " << epoch);
    const OffloadGuard guard(rig.offloader());
    train_step(100);
    CHECK(bounds(rig) == kOfStep);
    for (int i = 0; i < 20; ++i) {
      evaluate(1000);
    }
    CHECK(bounds(rig) == kOfStep);
  }
}

TEST_CASE_METHOD(NoLeak, "evaluation alone leaves no bounds behind") {
  Rig rig(late());
  const OffloadGuard guard(rig.offloader());
  for (int i = 0; i < 20; ++i) {
    evaluate(100);
    CHECK(bounds(rig) == Bounds{0, 0});
  }
}

TEST_CASE_METHOD(NoLeak, "a forward pass that was dropped is a step of its own to the policy") {
  std::vector<std::uint64_t> ordinals;
  Setting setting = late();
  setting.options.policy = callback([&ordinals](const Candidate& candidate) {
    ordinals.push_back(candidate.ordinal);
    return Decision::kOffload;
  });
  Rig rig(setting);
  const OffloadGuard guard(rig.offloader());
  for (int pass = 0; pass < 3; ++pass) {
    Inputs in;
    static_cast<void>(in.activation({8}).sin().exp());
  }
  CHECK(ordinals == std::vector<std::uint64_t>{0, 1, 0, 1, 0, 1});
  CHECK(rig.stats().steps == 3);
}

// Counts the steps that begin, and those that are dropped.
class StepCounter final : public Policy {
 public:
  void begin_step() override { ++begun; }
  void drop_step() override { ++dropped; }
  [[nodiscard]] Decision decide(const Candidate& /*candidate*/) override { return Decision::kOffload; }
  [[nodiscard]] bool needs_operation() const override { return false; }

  int begun = 0;
  int dropped = 0;
};

TEST_CASE_METHOD(NoLeak, "a policy is told of what is dropped before a step, and of no drop where backward follows") {
  const auto counter = std::make_shared<StepCounter>();
  Setting setting = late();
  setting.options.policy = minimum_size(1, counter);
  Rig rig(setting);
  for (int step = 1; step <= 3; ++step) {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    static_cast<void>(in.activation({1}).sin().exp());  // a norm that is logged, say
    network(in, 100).backward();
    CHECK(counter->begun == 2 * step);
    CHECK(counter->dropped == step);
  }
}

TEST_CASE_METHOD(NoLeak, "what the policy keeps does not raise the chosen bounds") {
  Setting setting = late();
  setting.options.policy = callback(
      [](const Candidate& candidate) { return candidate.bytes > 100 * kFloat ? Decision::kKeep : Decision::kOffload; });
  Rig rig(setting);
  const OffloadGuard guard(rig.offloader());
  for (int step = 0; step < 2; ++step) {
    Inputs in;
    (network(in, 100) + in.activation({100'000}).sin().sum()).backward();
    CHECK(bounds(rig) == kOfStep);
  }
}

TEST_CASE_METHOD(NoLeak, "while one is under way, evaluation has the bounds that a step of its size has") {
  Rig rig(late());
  const OffloadGuard guard(rig.offloader());
  for (int i = 0; i < 20; ++i) {
    Inputs in;
    const at::Tensor out = network(in, 100);
    CHECK(bounds(rig) == kOfStep);
  }
}

TEST_CASE_METHOD(NoLeak, "a smaller step lowers the bounds, and a dropped branch of a step counts as part of it") {
  Rig rig(late());
  for (const std::int64_t floats : {1000, 100}) {
    const OffloadGuard guard(rig.offloader());
    train_step(floats);
  }
  CHECK(bounds(rig) == kOfStep);
  const OffloadGuard guard(rig.offloader());
  Inputs in;
  const at::Tensor kept = in.activation({100}).sin();
  { const at::Tensor dropped = network(in, 100); }
  kept.sum().backward();
  CHECK(bounds(rig) == Bounds{51 * 100 * kFloat / 12, 51 * 100 * kFloat / 12});
}

TEST_CASE_METHOD(NoLeak, "evaluation between steps does not spoil the order that they have learned") {
  Setting setting = late_without_stash();
  setting.options.window_bytes = 300 * kFloat;
  Rig rig(setting);
  const OffloadGuard guard(rig.offloader());
  std::vector<std::uint64_t> ahead;
  for (int step = 0; step < 3; ++step) {
    std::vector<Inputs> in(3);
    Tensors losses;
    for (std::int64_t i = 0; i < 3; ++i) {
      losses.push_back(in[i].activation({100 * (i + 1)}).pow(2).sum());
    }
    for (const int i : {0, 2, 1}) {
      losses[i].backward();
      ahead.push_back(rig.stats().window.now_bytes / kFloat);
    }
    losses.clear();
    evaluate(50);
  }
  // The first step goes by the reverse order of saving, the others by what the first one did.
  CHECK(ahead == std::vector<std::uint64_t>{0, 200, 0, 300, 200, 0, 300, 200, 0});
}

}  // namespace
}  // namespace ebb
