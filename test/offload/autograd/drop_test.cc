// Graphs that end without a backward, in whole or in part, or not where they began: not one byte stays.

#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

TEST_CASE_METHOD(NoLeak, "of a graph that is dropped in part, the bytes of that part go and the rest is exact") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor leaf = in.leaf({1024});
  at::Tensor kept;
  at::Tensor dropped;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor trunk = leaf * 1.5;
    kept = trunk.sin().exp();     // saves the trunk and its own output
    dropped = trunk.cos().exp();  // the same
  }
  CHECK(rig.stats().pool.now_bytes == 3 * 1024 * sizeof(float));
  dropped.reset();
  CHECK(rig.stats().pool.now_bytes == 2 * 1024 * sizeof(float));
  const at::Tensor gradient = torch::autograd::grad({kept.sum()}, {leaf})[0];
  CHECK(rig.stats().pool.now_bytes == 0);
  CHECK(gradient.equal((leaf * 1.5).sin().exp().detach() * (leaf * 1.5).cos().detach() * 1.5));
}

// So many small graphs that whatever stays of each would show: bytes, entries of a table, open tickets.
void drop_many(const Setting& setting, int count) {
  Rig rig(setting);
  Inputs in;
  const at::Tensor leaf = in.leaf({4});
  const OffloadGuard guard(rig.offloader());
  static_cast<void>(leaf.exp());
  rig.check_empty();
  const std::uint64_t capacity = rig.stats().pool.capacity_bytes;
  const NoLeak freed;
  for (int i = 0; i < count; ++i) {
    static_cast<void>(leaf.exp());
  }
  rig.check_empty();
  CHECK(rig.stats().offloaded.tensors == static_cast<std::uint64_t>(count) + 1);
  CHECK(rig.stats().pool.capacity_bytes == capacity);
}

TEST_CASE_METHOD(NoLeak, "of 100,000 graphs that are dropped without backward not one byte stays") {
  drop_many(late_without_stash(), 100'000);
}

TEST_CASE_METHOD(NoLeak, "of 10,000 graphs that are dropped while their bytes go to the disk not one byte stays") {
  Setting setting = disk();
  setting.options.stash_bytes.reset();
  drop_many(setting, 10'000);
}

TEST_CASE_METHOD(NoLeak, "a graph may be dropped on another thread than it was built on, and in its own backward") {
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    at::Tensor elsewhere;
    at::Tensor within;
    {
      const OffloadGuard guard(rig.offloader());
      elsewhere = in.loss(two_layers(in));
      within = in.loss(two_layers(in).exp());
    }
    std::thread([dropped = std::exchange(elsewhere, {})]() mutable { dropped.reset(); }).join();
    within.register_hook([&within](const at::Tensor&) { within.reset(); });
    within.backward();
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "outputs of one operation that nobody uses leave nothing behind") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({6, 8});
    const auto [variance, mean] = at::var_mean(x, 1);
    const std::vector<at::Tensor> parts = x.exp().unbind(0);
    const auto [values, indices] = x.sin().max(1);
    in.loss(parts[3]).backward({}, /*retain_graph=*/true);
    in.loss(mean + values).backward();
    return in.gradients();
  });
}

}  // namespace
}  // namespace ebb
