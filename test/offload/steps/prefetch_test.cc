// What is fetched before anybody asks for it is a guess: it must cost nothing when it was wrong or cannot be made.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "policy/policies.h"
#include "test/checked/fault_plan.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

constexpr std::uint64_t kBytes = 32 * sizeof(float);

// Saves `count` storages of kBytes; backward wants them in the reverse order.
at::Tensor chain(const at::Tensor& x, int count) {
  at::Tensor y = x;
  for (int i = 0; i < count; ++i) {
    y = y.sin();
  }
  return y;
}

TEST_CASE_METHOD(
    NoLeak, "what was prefetched in vain is given up when the next step begins, each time, though its graph lives") {
  Setting setting = late_without_stash();
  setting.options.window_bytes = 4 * kBytes;
  Rig rig(setting);
  Inputs in;
  const at::Tensor input = in.activation({32});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor middle = chain(input, 6);
  const at::Tensor loss = chain(middle, 2).sum();
  for (int time = 0; time < 3; ++time) {
    static_cast<void>(grad({loss}, {middle}, {}, /*retain_graph=*/true));
    REQUIRE(rig.stats().window.now_bytes == 4 * kBytes);
    const at::Tensor next_input = in.activation({32});
    const at::Tensor next = chain(next_input, 6);
    CHECK(rig.stats().window.now_bytes == 0);
    CHECK(rig.stats().saved_on_device.now_bytes == 0);
    static_cast<void>(grad({next.sum()}, {next_input}));
  }
  static_cast<void>(grad({loss}, {input}));
}

TEST_CASE_METHOD(NoLeak, "without a plan, nothing is fetched before backward asks for something that has not stayed") {
  Setting setting = late_without_stash();
  setting.options.window_bytes = 4 * kBytes;
  setting.options.policy =
      callback([](const Candidate& candidate) { return candidate.ordinal < 6 ? Decision::kOffload : Decision::kKeep; });
  Rig rig(setting);
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor input = in.activation({32});
  const at::Tensor middle = chain(input, 7);
  const at::Tensor loss = chain(middle, 1).sum();
  REQUIRE(rig.stats().offloaded.tensors == 6);
  static_cast<void>(grad({loss}, {middle}, {}, /*retain_graph=*/true));
  CHECK(rig.stats().window.now_bytes == 0);
  static_cast<void>(grad({loss}, {input}));
}

TEST_CASE_METHOD(NoLeak, "a copy ahead that cannot start fails nobody: it is made again when somebody asks") {
  const auto point = GENERATE(FaultPoint::kCopy, FaultPoint::kDeviceAllocation);
  const Program program = [point](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = chain(in.activation({32}), 6).sum();
    }
    const PlannedFault second(point, 2, FaultPlan::Extent::kOnce);  // the first is asked for, the second is ahead
    loss.backward();
    if (run.offloader() != nullptr) {
      CHECK(FaultPlan::failures(point) == 1);
    }
    return in.gradients();
  };
  expect_parity(program, late_without_stash());
}

TEST_CASE_METHOD(NoLeak, "a fetch that the device has no room for empties the stash and is tried once more") {
  Rig rig(late());
  Inputs in;
  const auto forward = [&](int count) {
    const OffloadGuard guard(rig.offloader());
    return chain(in.activation({32}), count).sum();
  };
  const at::Tensor loss = forward(2);
  rig.offloader().drain();
  const at::Tensor another = forward(3);  // its sources are on their way out
  REQUIRE(rig.stats().stash.now_bytes > 0);
  const PlannedFault full(FaultPoint::kDeviceAllocation, 1, FaultPlan::Extent::kOnce);
  loss.backward();
  CHECK(FaultPlan::failures(FaultPoint::kDeviceAllocation) == 1);
  CHECK(rig.stats().stash.now_bytes == 0);
  const Tensors found = in.gradients();
  Inputs same;
  chain(same.activation({32}), 2).sum().backward();
  CHECK(found[0].equal(same.gradients()[0]));
}

}  // namespace
}  // namespace ebb
