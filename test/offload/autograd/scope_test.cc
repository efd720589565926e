// Guards that end out of order, elsewhere than they began, or while others hold on to the state of their thread.

#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ThreadLocalState.h>
#include <catch2/catch.hpp>

#include "offload/checkpoint.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

TEST_CASE_METHOD(NoLeak, "of two guards of which the outer one ends first, the inner one stays in force") {
  Rig outer(late());
  Rig inner(late());
  auto outer_guard = guard_on(outer);
  auto inner_guard = guard_on(inner);
  outer_guard.reset();
  CHECK(seen_by(inner) == 1);
  CHECK(seen_by(outer) == 0);
  inner_guard.reset();
  CHECK(seen_by(inner) == 0);
  CHECK(seen_by(outer) == 0);
}

TEST_CASE_METHOD(NoLeak, "of three guards of which the middle one ends first, the others stay as they are") {
  Rig outer(late());
  Rig middle(late());
  Rig inner(late());
  auto outer_guard = guard_on(outer);
  auto middle_guard = guard_on(middle);
  auto inner_guard = guard_on(inner);
  middle_guard.reset();
  CHECK(seen_by(inner) == 1);
  inner_guard.reset();
  CHECK(seen_by(middle) == 0);
  CHECK(seen_by(outer) == 1);
}

TEST_CASE_METHOD(NoLeak, "a NoOpGuard that ends before a guard inside it has no more effect") {
  Rig rig(late());
  auto outer = guard_on(rig);
  auto off = std::make_unique<NoOpGuard>();
  auto inner = guard_on(rig);
  off.reset();
  inner.reset();
  CHECK(seen_by(rig) == 1);
}

TEST_CASE_METHOD(NoLeak, "guards nested two hundred deep are in force one by one as they end") {
  std::vector<std::unique_ptr<Rig>> rigs;
  for (int i = 0; i < 2; ++i) {
    rigs.push_back(std::make_unique<Rig>(late()));
  }
  std::vector<std::unique_ptr<OffloadGuard>> guards;
  for (int depth = 0; depth < 200; ++depth) {
    guards.push_back(guard_on(*rigs[depth % 2]));
  }
  while (!guards.empty()) {
    const std::size_t last = (guards.size() - 1) % 2;
    CHECK(seen_by(*rigs[last]) == 1);
    CHECK(seen_by(*rigs[1 - last]) == 0);
    guards.pop_back();
  }
  CHECK(seen_by(*rigs[0]) == 0);
}

TEST_CASE_METHOD(NoLeak, "an exception takes all guards that it passes off the thread") {
  Rig rig(late());
  Rig inner(late());
  try {
    const OffloadGuard guard(rig.offloader());
    const NoOpGuard off;
    const OffloadGuard inside(inner.offloader());
    throw std::runtime_error("the user's forward failed");
  } catch (const std::runtime_error&) {
    CHECK(seen_by(rig) == 0);
    CHECK(seen_by(inner) == 0);
  }
}

TEST_CASE_METHOD(NoLeak, "a guard that ends on another thread is over on its own thread too") {
  Rig rig(late());
  auto guard = guard_on(rig);
  std::thread([&] { guard.reset(); }).join();
  CHECK(seen_by(rig) == 0);
  guard = guard_on(rig);
  CHECK(seen_by(rig) == 1);
}

TEST_CASE_METHOD(NoLeak, "a guard that has ended does not come back with a captured state of its thread") {
  Rig rig(late());
  auto guard = guard_on(rig);
  const at::ThreadLocalState captured;
  {
    const at::ThreadLocalStateGuard restored(captured);
    CHECK(seen_by(rig) == 1);
  }
  guard.reset();
  const at::ThreadLocalStateGuard restored(captured);
  CHECK(seen_by(rig) == 0);
}

TEST_CASE_METHOD(NoLeak, "in a captured state, a guard that has ended uncovers the one around it") {
  Rig outer(late());
  Rig inner(late());
  const auto outer_guard = guard_on(outer);
  auto inner_guard = guard_on(inner);
  const at::ThreadLocalState with_inner;
  inner_guard.reset();
  auto off = std::make_unique<NoOpGuard>();
  const at::ThreadLocalState with_no_op;
  off.reset();
  {
    const at::ThreadLocalStateGuard restored(with_inner);
    CHECK(seen_by(inner) == 0);
    CHECK(seen_by(outer) == 1);
  }
  const at::ThreadLocalStateGuard restored(with_no_op);
  CHECK(seen_by(outer) == 1);
}

TEST_CASE_METHOD(NoLeak,
                 "a guard that a checkpointed function leaves behind takes saves once the region's run is over") {
  Rig rig(late());
  std::unique_ptr<OffloadGuard> guard;
  const auto function = [&](const std::vector<at::Tensor>& inputs) {
    guard = guard_on(rig);
    CHECK(seen_by(rig) == 0);  // the region's
    return std::vector<at::Tensor>{inputs[0] * 2};
  };
  const std::vector<at::Tensor> outputs = checkpoint(function, {at::rand({4}).requires_grad_()});
  CHECK(seen_by(rig) == 1);
  guard.reset();
  CHECK(seen_by(rig) == 0);
}

TEST_CASE_METHOD(NoLeak, "a captured state keeps nothing of an offloader whose guards have ended") {
  const auto tier = make_tier(late());
  auto offloader = make_offloader(late(), tier);
  auto guard = std::make_unique<OffloadGuard>(*offloader);
  (at::rand({4}).requires_grad_() * 2).pow(2);
  const at::ThreadLocalState captured;
  guard.reset();
  offloader.reset();
  CHECK(tier.use_count() == 1);
}

TEST_CASE_METHOD(NoLeak, "a task that takes its thread's state from one under a guard saves through that guard") {
  Rig rig(late());
  const auto guard = guard_on(rig);
  const at::ThreadLocalState captured;
  std::uint64_t seen = 0;
  std::thread([&] {
    CHECK(seen_by(rig) == 0);
    const at::ThreadLocalStateGuard restored(captured);
    seen = seen_by(rig);
  }).join();
  CHECK(seen == 1);
}

}  // namespace
}  // namespace ebb
