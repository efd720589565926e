// Higher derivatives: backward through what backward itself saved.

#include <memory>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

TEST_CASE_METHOD(NoLeak, "a third derivative is exact whichever of its three passes are under a guard") {
  const int guarded = GENERATE(0, 1, 2, 3, 4, 5, 6, 7);  // one bit a pass
  expect_parity([=](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({7});
    at::Tensor y;
    {
      const auto guard = run.guard();
      y = ((x * 0.5).exp() * x.sin()).sum();
    }
    Tensors results;
    for (int pass = 0; pass < 3; ++pass) {
      const auto guard = (guarded >> pass & 1) != 0 ? run.guard() : nullptr;
      const at::Tensor derived = grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      results.push_back(derived.detach());
      y = derived.sum();
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "what a backward pass saves goes through the guard that it is called under, or through none") {
  const bool guarded = GENERATE(false, true);
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.leaf({16});
  const at::Tensor loss = (x * 1.5).exp().sin().sum();  // outside of any guard
  auto guard = guarded ? std::make_unique<OffloadGuard>(rig.offloader()) : nullptr;
  const at::Tensor first = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  guard.reset();
  CHECK((rig.stats().saved.tensors > 0) == guarded);
  CHECK((rig.stats().offloaded.tensors > 0) == guarded);
  CHECK(grad({first.sum()}, {x})[0].defined());
  CHECK((rig.stats().fetched.tensors > 0) == guarded);
}

TEST_CASE_METHOD(NoLeak, "products of a Hessian with many vectors over one retained gradient are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.leaf({8});
    const at::Tensor weight = in.leaf({8, 8});
    const at::Tensor loss = at::mv(weight, x * 2).tanh().pow(2).sum();
    const at::Tensor gradient = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    Tensors results;
    for (int i = 0; i < 5; ++i) {
      results.push_back(grad({gradient}, {x}, {in.constant({8})}, /*retain_graph=*/true)[0]);
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "the second derivative through every kind of view is exact") {
  const bool guard_in_backward = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor x = in.leaf({6, 6});
    const at::Tensor y = x * 1.5;
    const Tensors views{y.t(),
                        y.narrow(0, 1, 3),
                        y.select(1, 2),
                        y.view({4, 9}),
                        y.diagonal(),
                        y.unfold(1, 2, 1),
                        y.slice(1, 0, 6, 2),
                        y.unsqueeze(0).expand({2, 6, 6}),
                        y.as_strided({4, 4}, {3, 2}, 1)};
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& view : views) {
      loss = loss + view.pow(3).sum() + view.sin().square().sum();
    }
    if (!guard_in_backward) {
      guard.reset();
    }
    const at::Tensor first = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return Tensors{first.detach(), grad({first.square().sum()}, {x})[0]};
  });
}

}  // namespace
}  // namespace ebb
