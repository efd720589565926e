// Operations that save a tensor first and fill it afterwards.

#include <algorithm>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/checked/fault_plan.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

at::Generator seeded() { return at::detail::createCPUGenerator(/*seed_val=*/11); }

at::Tensor noisy(const at::Tensor& x) { return at::rrelu(x, 0.1, 0.9, /*training=*/true, seeded()); }

at::Tensor noisy_in_place(const at::Tensor& x) {
  at::Tensor out = x + 1;
  return at::rrelu_(out, 0.1, 0.9, /*training=*/true, seeded());
}

TEST_CASE_METHOD(NoLeak, "rrelu in training mode has exact gradients though it saves its noise before filling it") {
  const Forward forward = [](Inputs& in) { return noisy(in.activation({7, 9})).sin(); };
  expect_gradient_parity(forward);
}

TEST_CASE_METHOD(NoLeak, "rrelu_ in training mode has exact gradients though it saves its noise before filling it") {
  const Forward forward = [](Inputs& in) { return noisy_in_place(in.activation({7, 9})).sin(); };
  expect_gradient_parity(forward);
}

TEST_CASE_METHOD(NoLeak, "rrelus in a row, under a guard each, and last in the graph, have exact gradients") {
  expect_parity([](const Run& run) {
    Inputs in;
    at::Tensor x = in.activation({4, 5});
    for (int layer = 0; layer < 3; ++layer) {
      const auto guard = run.guard();
      x = noisy_in_place(noisy(x));
    }
    x.sum().backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a copy that waits for its operation starts at the next operation's save, and not before") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.leaf({8});
  const at::Tensor y = in.leaf({8});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor first = at::mul(x, at::ones({8}));
  CHECK(rig.stats().stalls == 0);
  CHECK(rig.stats().saved_on_device.now_bytes == 8 * sizeof(float));
  const at::Tensor second = at::mul(y, at::ones({8}));
  CHECK(rig.stats().stalls == 1);
  CHECK(rig.stats().saved_on_device.now_bytes == 8 * sizeof(float));
}

TEST_CASE_METHOD(NoLeak, "a copy that waits for its operation starts at the latest when the guard ends") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor out;
  {
    const OffloadGuard guard(rig.offloader());
    out = at::mul(in.leaf({8}), at::ones({8}));
  }
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  CHECK(rig.stats().offloaded.tensors == 1);
  out.sum().backward();
  CHECK(rig.stats().fetched.tensors == 1);
  CHECK(at::equal(in.gradients()[0], at::ones({8})));
}

TEST_CASE_METHOD(NoLeak, "a storage that is resized before its copy has started stays, with its new memory") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor factor = in.constant({8});
    const at::Tensor loss = (in.leaf({8}) * factor).sum();
    at::empty({0}).set_(factor).resize_({100'000});  // the memory that was saved is freed
    guard.reset();
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a save that is dropped before its copy has started is never copied") {
  Rig rig(late());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  { const at::Tensor dropped = at::mul(in.leaf({8}), at::ones({8})); }
  CHECK(rig.stats().pool.now_bytes == 0);
  CHECK(rig.stats().saved_on_device.peak_bytes == 8 * sizeof(float));
  CHECK(rig.stats().stash.peak_bytes == 0);
  CHECK(rig.stats().offloaded.tensors == 0);
  CHECK(rig.stats().kept_for(KeptReason::kDeferred).tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "a copy that waits for its operation and then cannot start fails nobody, and is counted") {
  const Program program = [](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.leaf({8}) * in.constant({8});  // the constant's copy waits
    const PlannedFault fault(FaultPoint::kCopy, 1, FaultPlan::Extent::kOnce);
    const at::Tensor y = x.sin();
    if (run.offloader() != nullptr) {
      const Stats stats = run.offloader()->stats();
      CHECK(FaultPlan::failures(FaultPoint::kCopy) == 1);
      CHECK(stats.kept_for(KeptReason::kDeferred).tensors == 1);
      CHECK(stats.offloaded.tensors == 1);
      CHECK(stats.saved.tensors == 2);
    }
    y.sum().backward();
    return in.gradients();
  };
  Rig rig(late_without_stash());
  check_same(plain(program), outcome(program, Run(&rig.offloader())));
}

}  // namespace
}  // namespace ebb
