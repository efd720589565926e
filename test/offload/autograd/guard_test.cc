// Guards: where they may be put, how they nest, and what may end before backward.

#include <memory>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

// A loss whose graph has exactly one save, of `floats` floats.
at::Tensor one_save(Inputs& in, std::int64_t floats) { return in.activation({floats}).pow(2).sum(); }

TEST_CASE_METHOD(NoLeak, "several steps under one guard are as exact as one guard for each") {
  expect_parity([](const Run& run) {
    Tensors results;
    const auto guard = run.guard();
    for (int step = 0; step < 4; ++step) {
      Inputs in;
      in.loss(two_layers(in)).backward();
      for (const at::Tensor& gradient : in.gradients()) {
        results.push_back(gradient);
      }
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "a guard for each layer is as exact as one around them all") {
  expect_parity([](const Run& run) {
    Inputs in;
    at::Tensor x = in.activation({5, 8});
    for (int i = 0; i < 4; ++i) {
      const auto guard = i == 2 ? nullptr : run.guard();
      x = layer(in, x);
    }
    in.loss(x).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "of two nested guards the innermost wins, and the outer one takes over again") {
  Rig outer(late_without_stash());
  Rig inner(late_without_stash());
  Inputs in;
  Tensors losses;
  {
    const OffloadGuard outer_guard(outer.offloader());
    losses.push_back(one_save(in, 10));
    {
      const OffloadGuard inner_guard(inner.offloader());
      losses.push_back(one_save(in, 20));
      losses.push_back(one_save(in, 30));
      const OffloadGuard outer_again(outer.offloader());
      losses.push_back(one_save(in, 40));
    }
    losses.push_back(one_save(in, 50));
  }
  losses.push_back(one_save(in, 60));
  CHECK(outer.stats().offloaded.tensors == 3);
  CHECK(outer.stats().offloaded.bytes == (10 + 40 + 50) * sizeof(float));
  CHECK(inner.stats().offloaded.tensors == 2);
  CHECK(inner.stats().offloaded.bytes == (20 + 30) * sizeof(float));
  for (const at::Tensor& loss : losses) {
    loss.backward();
  }
  CHECK(outer.stats().fetched.tensors == 3);
  CHECK(inner.stats().fetched.tensors == 2);
  for (const at::Tensor& gradient : in.gradients()) {
    CHECK(at::isfinite(gradient).all().item<bool>());
  }
}

TEST_CASE_METHOD(NoLeak, "a graph built under two offloaders in turn has exact gradients") {
  Rig other(late_without_stash());
  expect_parity([&](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = layer(in, in.activation({5, 8}));
    {
      const auto nested = run.offloader() == nullptr ? nullptr : std::make_unique<OffloadGuard>(other.offloader());
      x = layer(in, x);
    }
    in.loss(layer(in, x)).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "saves under a NoOpGuard are left to LibTorch and are not counted") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = one_save(in, 10);
    const Stats before = rig.stats();
    {
      const NoOpGuard head;
      loss = loss + one_save(in, 20);
      CHECK(rig.stats().saved.tensors == before.saved.tensors);
      CHECK(rig.stats().saved_on_device.now_bytes == before.saved_on_device.now_bytes);
      const OffloadGuard inside(rig.offloader());
      loss = loss + one_save(in, 30);
    }
    loss = loss + one_save(in, 40);
  }
  CHECK(rig.stats().saved.bytes == (10 + 30 + 40) * sizeof(float));
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "a NoOpGuard around a part of the graph keeps its gradients") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = two_layers(in);
    const auto head = run.no_op();
    in.loss(layer(in, x)).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "the guards of a disabled offloader do nothing") {
  Options options;
  options.enabled = false;
  options.window_bytes = 0;  // not even looked at
  Offloader disabled(options);
  Rig outer(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(disabled);
    loss = one_save(in, 10);
    CHECK(disabled.stats().saved.tensors == 0);
    const OffloadGuard outer_guard(outer.offloader());
    const OffloadGuard nested(disabled);
    loss = loss + one_save(in, 20);
  }
  CHECK(outer.stats().saved.tensors == 1);
  disabled.exclude(in.leaf({2}));
  disabled.drain();
  disabled.reset_stats();
  CHECK(disabled.take_timeline().empty());
  CHECK(disabled.stats().steps == 0);
  loss.backward();
}

TEST_CASE_METHOD(NoLeak, "an offloader may end before backward, under its guard too") {
  const bool guard_outlives = GENERATE(false, true);
  const Outcome expected = plain(train(two_layers, false));
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    const std::shared_ptr<SimulatedTier> tier = make_tier(setting);
    std::unique_ptr<Offloader> offloader = make_offloader(setting, tier);
    Inputs in;
    Tensors results;
    {
      auto guard = std::make_unique<OffloadGuard>(*offloader);
      at::Tensor out = two_layers(in);
      results.push_back(out.detach().clone());
      const at::Tensor loss = in.loss(out);
      out.reset();
      if (!guard_outlives) {
        guard.reset();
      }
      offloader.reset();
      loss.backward();
    }
    for (const at::Tensor& gradient : in.gradients()) {
      results.push_back(gradient);
    }
    check_same(expected, {results, ""});
    if (tier != nullptr) {
      CHECK(tier->pool_stats().now_bytes == 0);
      CHECK(tier->device_bytes().now == 0);
    }
  }
}

}  // namespace
}  // namespace ebb
