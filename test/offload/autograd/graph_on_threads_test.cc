// One graph, many threads: each of them goes backward through all of it, or through a part.

#include <array>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "test/offload/networks.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

TEST_CASE_METHOD(NoLeak, "eight threads that go backward through one retained graph at once get the same gradients") {
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    Inputs in;
    const at::Tensor leaf = in.leaf({6, 6});
    const auto forward = [&leaf] { return at::mm(leaf.sin() * 1.5, leaf.exp()).softmax(1).pow(3).sum(); };
    const at::Tensor expected = grad({forward()}, {leaf})[0];
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      loss = forward();
    }
    std::array<Tensors, 8> found;
    on_threads(found.size(), [&](std::size_t i) {
      for (int pass = 0; pass < 5; ++pass) {
        found[i].push_back(grad({loss}, {leaf}, {}, /*retain_graph=*/true)[0]);
      }
    });
    for (const Tensors& of_thread : found) {
      for (const at::Tensor& gradient : of_thread) {
        CHECK(gradient.equal(expected));
      }
    }
    loss.reset();
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "parts of one graph that different threads run give the gradients of the whole") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor leaf = in.leaf({6, 6});
    const at::Tensor trunk = at::mm(leaf.sin() * 1.5, leaf.exp());
    Tensors heads;
    for (int i = 0; i < 6; ++i) {
      heads.push_back((trunk.sigmoid() * trunk.cos()).pow(i + 1).sum());
    }
    guard.reset();
    Tensors of_heads(heads.size());
    on_threads(heads.size(), [&](std::size_t i) { of_heads[i] = grad({heads[i]}, {trunk}, {}, true)[0]; });
    at::Tensor sum = at::zeros_like(trunk);
    for (const at::Tensor& each : of_heads) {
      sum = sum + each;
    }
    std::thread([&] { trunk.backward(sum); }).join();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a graph whose thread has ended, guard and all, goes backward on any other") {
  expect_parity([](const Run& run) {
    Inputs in;
    at::Tensor loss;
    std::thread([&] {
      const auto guard = run.guard();
      loss = in.loss(two_layers(in));
    }).join();
    std::thread([&] { loss.backward({}, /*retain_graph=*/true); }).join();
    loss.backward();
    return in.gradients();
  });
}

}  // namespace
}  // namespace ebb
