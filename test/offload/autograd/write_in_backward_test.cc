// A backward that writes into the tensor that it saved.

#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Multiplies what it saved in place, as a backward may that wants to spare memory.
struct WritesInBackward : torch::autograd::Function<WritesInBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.square();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    at::Tensor x = context->get_saved_variables()[0];
    return {x.mul_(2).mul_(gradients[0])};
  }
};

TEST_CASE_METHOD(NoLeak, "a backward that writes into what it saved gets its gradient") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor loss = in.loss(WritesInBackward::apply(in.activation({6})));
    guard.reset();
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a second pass after a backward that writes into what it saved raises LibTorch's error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        auto guard = run.guard();
        const at::Tensor loss = in.loss(WritesInBackward::apply(in.activation({6})));
        guard.reset();
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        return in.gradients();
      },
      "has been modified by an inplace operation", Words::kButProducer);
}

TEST_CASE_METHOD(NoLeak,
                 "a node that asks after another one wrote into the same saved tensor raises LibTorch's error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        auto guard = run.guard();
        const at::Tensor x = in.activation({6});
        const at::Tensor earlier = x.pow(3);  // its node has the lower number, so it runs after the other
        const at::Tensor loss = in.loss(earlier) + in.loss(WritesInBackward::apply(x));
        guard.reset();
        loss.backward();
        return in.gradients();
      },
      "has been modified by an inplace operation", Words::kButProducer);
}

}  // namespace
}  // namespace ebb
