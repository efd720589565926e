// A tier that refuses: memory on the way back, and copies that it does not even queue.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "test/checked/fault_plan.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using Extent = FaultPlan::Extent;

// A graph of one save that the user no longer holds, built under the guard.
at::Tensor one_save(Inputs& in, Rig& rig) {
  const OffloadGuard guard(rig.offloader());
  return in.activation({16}).pow(2).sum();
}

// A product with a constant, which is saved before anybody can know that it is filled: its copy starts later.
at::Tensor one_late_copy(Inputs& in) { return (in.leaf({16}) * at::full({16}, 3.0)).sum(); }

TEST_CASE_METHOD(
    NoLeak, "no device memory for what backward asks for is an OutOfMemoryError, and the graph may be asked again") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor loss = one_save(in, rig);
  {
    const PlannedFault fault(FaultPoint::kDeviceAllocation, 1, Extent::kFromThenOn);  // it is asked twice
    CHECK_THROWS_AS(loss.backward({}, /*retain_graph=*/true), c10::OutOfMemoryError);
  }
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  loss.backward();
  CHECK(at::equal(in.gradients()[0], in.gradients()[0].clone()));
  CHECK(rig.stats().fetched.tensors == 1);
}

TEST_CASE_METHOD(NoLeak, "no device memory for what is only prefetched is no error") {
  const Program program = train(
      [](Inputs& in) {
        at::Tensor x = in.activation({16});
        for (int i = 0; i < 6; ++i) {
          x = x.sin();
        }
        return x;
      },
      false);
  const Outcome expected = plain(program);
  Rig rig(late_without_stash());
  int exact = 0;
  for (std::uint64_t nth = 1; nth <= 8; ++nth) {
    const PlannedFault fault(FaultPoint::kDeviceAllocation, nth, Extent::kOnce);
    const Outcome found = outcome(program, Run(&rig.offloader()));
    if (found.error.empty()) {
      check_same(expected, found);
      ++exact;
    } else {
      CHECK_THAT(found.error, Catch::Contains("out of memory"));
    }
    rig.check_empty();
  }
  CHECK(exact >= 6);  // all but the first use, which nobody could prefetch
}

TEST_CASE_METHOD(NoLeak,
                 "a copy out that the tier refuses is an error at the save, which is then as if it had not been made") {
  Rig rig(late());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor x = in.activation({16});
  {
    const PlannedFault fault(FaultPoint::kCopy, 1, Extent::kOnce);
    CHECK_THROWS_AS(x.pow(2), c10::Error);
  }
  CHECK(rig.stats().pool.now_bytes == 0);
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
  x.pow(2).sum().backward();
  CHECK(rig.stats().offloaded.tensors == 1);
}

TEST_CASE_METHOD(
    NoLeak, "a copy that waited for its operation and is refused at the guard's end leaves its storage where it is") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = one_late_copy(in);
    FaultPlan::arm(FaultPoint::kCopy, 1, Extent::kFromThenOn);
  }
  CHECK(FaultPlan::failures(FaultPoint::kCopy) == 1);
  FaultPlan::disarm();
  CHECK(rig.stats().saved_on_device.now_bytes == 16 * sizeof(float));
  loss.backward();
  CHECK(at::equal(in.gradients()[0], at::full({16}, 3.0)));
}

}  // namespace
}  // namespace ebb
