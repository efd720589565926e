// Backward again and again over one graph.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

TEST_CASE_METHOD(NoLeak, "twenty passes over a retained graph fetch the same bytes each and leave none on the device") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = in.loss(two_tanh_layers(in));
  }
  const std::uint64_t block_bytes = rig.stats().pool.now_bytes;
  const std::uint64_t storages = rig.stats().offloaded.tensors;
  for (std::uint64_t pass = 1; pass <= 20; ++pass) {
    INFO("pass " << pass);
    loss.backward({}, /*retain_graph=*/true);
    CHECK(rig.stats().fetched.tensors == pass * storages);
    CHECK(rig.stats().saved_on_device.now_bytes == 0);
    CHECK(rig.stats().pool.now_bytes == block_bytes);
  }
  loss.backward();
  CHECK(rig.stats().pool.now_bytes == 0);
}

TEST_CASE_METHOD(NoLeak, "each pass over a retained graph gives the first one's gradients to the bit") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor a = in.leaf({6, 6});
    const at::Tensor loss = in.loss(at::mm(a * 1.5, a.exp()).softmax(1));
    guard.reset();
    Tensors results;
    for (int pass = 0; pass < 12; ++pass) {
      results.push_back(grad({loss}, {a}, {}, /*retain_graph=*/true)[0]);
      CHECK(results.back().equal(results.front()));
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "several roots with gradients of their own, some of them twice, are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor trunk = two_tanh_layers(in);
    const at::Tensor a = trunk.exp();
    const at::Tensor b = trunk.sin().t();
    guard.reset();
    torch::autograd::backward({a, b}, {in.constant({5, 8}), in.constant({8, 5})}, /*retain_graph=*/true);
    torch::autograd::backward({b, a, b}, {in.constant({8, 5}), in.constant({5, 8}), in.constant({8, 5})});
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a second backward without retain_graph raises LibTorch's error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor loss = in.loss(two_tanh_layers(in));
        loss.backward();
        loss.backward();
        return in.gradients();
      },
      "Trying to backward through the graph a second time");
}

TEST_CASE_METHOD(NoLeak, "backward into a part of the graph that is used up raises LibTorch's error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor trunk = two_tanh_layers(in).exp();
        const at::Tensor first = in.loss(trunk.sin());
        const at::Tensor second = in.loss(trunk.cos());
        first.backward();
        second.backward();
        return in.gradients();
      },
      "Trying to backward through the graph a second time");
}

TEST_CASE_METHOD(NoLeak, "a graph that is retained over many steps of another one keeps its bytes") {
  expect_parity([](const Run& run) {
    Inputs kept;
    auto guard = run.guard();
    const at::Tensor loss = kept.loss(two_tanh_layers(kept));
    Tensors results;
    for (int step = 0; step < 6; ++step) {
      Inputs in;
      in.loss(two_tanh_layers(in)).backward();
      loss.backward({}, /*retain_graph=*/true);
      for (const at::Tensor& gradient : kept.gradients()) {
        results.push_back(gradient.clone());
      }
    }
    return results;
  });
}

}  // namespace
}  // namespace ebb
