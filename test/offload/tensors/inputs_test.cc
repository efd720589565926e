// The gradients of some of the inputs: of every subset, and of those that were not used.

#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

TEST_CASE_METHOD(NoLeak, "the gradients of every subset of the inputs, one after the other, are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    Tensors leaves;
    at::Tensor x = in.activation({4, 4});
    for (int i = 0; i < 4; ++i) {
      leaves.push_back(in.leaf({4, 4}));
      x = at::mm(x, leaves.back()).sigmoid() * x;
    }
    const at::Tensor loss = in.loss(x);
    x.reset();
    guard.reset();
    Tensors results;
    for (int subset = 1; subset < 16; ++subset) {
      Tensors wanted;
      for (int i = 0; i < 4; ++i) {
        if ((subset >> i & 1) != 0) {
          wanted.push_back(leaves[i]);
        }
      }
      for (at::Tensor& gradient : grad({loss}, wanted, {}, /*retain_graph=*/true)) {
        results.push_back(std::move(gradient));
      }
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "an input that was not used has no gradient where that is allowed") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor used = in.leaf({4});
    const at::Tensor unused = in.leaf({4});
    const at::Tensor dropped = (unused * 1.5).exp();
    const at::Tensor loss = (used * 1.5).exp().sum();
    return grad({loss}, {unused, used}, {}, std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
  });
}

TEST_CASE_METHOD(NoLeak, "an input that was not used raises LibTorch's error where it is not allowed") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor used = in.leaf({4});
        const at::Tensor unused = in.leaf({4});
        return grad({(used * 1.5).exp().sum()}, {unused, used});
      },
      "appears to not have been used");
}

}  // namespace
}  // namespace ebb
