// Backward within backward: in custom functions, thousands of levels deep, and in hooks.

#include <cstdint>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::grad;
using torch::autograd::variable_list;

// Each backward runs a forward and a backward of its own, `depth` levels deep: at each level the derivative of x^2.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t depth) {
    context->save_for_backward({x});
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    const at::AutoGradMode with_gradients(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor negated = x * -1.0;
    const at::Tensor y = depth == 0 ? negated.square() : Nested::apply(negated, depth - 1);
    return {gradients[0] * grad({y.sum()}, {x})[0], at::Tensor()};
  }
};

// LibTorch starts a thread for each 60 levels.
constexpr std::int64_t kLevels = 130;
constexpr std::int64_t kDeep = 10'000;

TEST_CASE_METHOD(NoLeak, "backward within backward, 10,000 levels deep, saves at each level and is exact") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor leaf = in.leaf({2});
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = Nested::apply(leaf * 1.5, kDeep).sum();
  loss.backward();
  CHECK(rig.stats().saved.tensors >= static_cast<std::uint64_t>(kDeep));
  CHECK(leaf.grad().equal((leaf.detach() * 1.5) * 2 * 1.5));
}

TEST_CASE_METHOD(NoLeak, "backward within backward on LibTorch's own threads goes through the guard and is exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    in.loss(Nested::apply(in.activation({6}, at::kDouble), kLevels)).backward();
    return in.gradients();
  });
  Rig rig(late_without_stash());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  in.loss(Nested::apply(in.activation({6}, at::kDouble), kLevels)).backward();
  CHECK(rig.stats().offloaded.tensors >= kLevels);
}

TEST_CASE_METHOD(NoLeak, "a hook that runs another graph's backward leaves both exact") {
  expect_parity([](const Run& run) {
    Inputs outer;
    Inputs inner;
    const auto guard = run.guard();
    const at::Tensor inner_loss = inner.loss(two_layers(inner));
    const at::Tensor out = two_layers(outer);
    out.register_hook([&](const at::Tensor&) { inner_loss.backward({}, /*retain_graph=*/true); });
    const at::Tensor loss = outer.loss(out.exp());
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    Tensors results = outer.gradients();
    for (at::Tensor& gradient : inner.gradients()) {
      results.push_back(std::move(gradient));
    }
    return results;
  });
}

}  // namespace
}  // namespace ebb
