// Backward in all its forms: again, twice derived, in parts, never, several graphs at once.

#include <algorithm>
#include <array>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/networks.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::grad;

TEST_CASE_METHOD(NoLeak, "backward through a retained graph three times gives the same sums of gradients") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor loss = in.loss(three_layers(in));
    guard.reset();
    Tensors results;
    for (int pass = 0; pass < 3; ++pass) {
      loss.backward({}, /*retain_graph=*/pass < 2);
      for (const at::Tensor& gradient : in.gradients()) {
        results.push_back(gradient.clone());
      }
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "double backward is exact with the guard on in either pass, in both and in neither") {
  const bool first = GENERATE(false, true);
  const bool second = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    auto guard = first ? run.guard() : nullptr;
    const at::Tensor weight = in.leaf({8, 8});
    const at::Tensor x = in.leaf({4, 8});
    at::Tensor out = at::tanh(at::linear(x * 1.5, weight)).pow(3).softmax(1);
    const at::Tensor loss = in.loss(out);
    out.reset();
    guard.reset();
    guard = second ? run.guard() : nullptr;
    const auto gradients = grad({loss}, {x, weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    guard.reset();
    const at::Tensor penalty = gradients[0].square().sum() + gradients[1].pow(3).sum();
    penalty.backward();
    return Tensors{gradients[0].detach(), gradients[1].detach(), x.grad(), weight.grad()};
  });
}

TEST_CASE_METHOD(NoLeak, "what a backward pass saves for a second one moves away too") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor x = in.leaf({32});
  const at::Tensor loss = (x * 1.5).exp().sum();
  torch::autograd::variable_list gradient;
  {
    const OffloadGuard guard(rig.offloader());
    gradient = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  }
  CHECK(rig.stats().saved.tensors > 0);
  CHECK(rig.stats().offloaded.tensors > 0);
}

TEST_CASE_METHOD(NoLeak, "a third derivative is exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.leaf({6});
    at::Tensor y = (x * 1.1).pow(4).exp().sum() * 1e-3;
    for (int order = 0; order < 3; ++order) {
      y = grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0].sum();
    }
    return Tensors{y.detach()};
  });
}

TEST_CASE_METHOD(NoLeak, "gradients of some of the inputs, and then of the others, are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor a = in.leaf({4, 4});
    const at::Tensor b = in.leaf({4, 4});
    const at::Tensor hidden = at::mm(a.sin(), b.cos()).exp();
    const at::Tensor loss = in.loss(hidden * hidden.sigmoid());
    guard.reset();
    const at::Tensor of_b = grad({loss}, {b}, {}, /*retain_graph=*/true)[0];
    const at::Tensor of_hidden = grad({loss}, {hidden}, {}, /*retain_graph=*/true)[0];
    return Tensors{of_b, of_hidden, grad({loss}, {a})[0]};
  });
}

TEST_CASE_METHOD(NoLeak, "a branch that has no backward leaves nothing behind and disturbs nothing") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor trunk = three_layers(in);
    { const at::Tensor dropped = in.loss(trunk.exp().pow(2)); }
    const at::Tensor unused = trunk.sin().pow(3);
    in.loss(trunk.pow(2)).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "several graphs alive at once go backward in any order") {
  const auto order = GENERATE(std::vector<int>{0, 1, 2}, std::vector<int>{2, 1, 0}, std::vector<int>{1, 2, 0});
  const bool guard_for_each = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    std::array<Inputs, 3> in;
    Tensors losses;
    auto guard = run.guard();
    for (Inputs& each : in) {
      losses.push_back(each.loss(three_layers(each)));
      if (guard_for_each) {
        guard.reset();
        guard = run.guard();
      }
    }
    guard.reset();
    Tensors results;
    for (const int i : order) {
      losses[i].backward();
      losses[i].reset();
      std::ranges::copy(in[i].gradients(), std::back_inserter(results));
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "graphs that are built while others go backward keep their gradients") {
  expect_parity([](const Run& run) {
    std::array<Inputs, 4> in;
    Tensors losses;
    const auto guard = run.guard();
    for (std::size_t i = 0; i < in.size(); ++i) {
      losses.push_back(in[i].loss(three_layers(in[i])));
      if (i > 0) {
        losses[i - 1].backward();
      }
    }
    losses.back().backward();
    Tensors results;
    for (const Inputs& each : in) {
      std::ranges::copy(each.gradients(), std::back_inserter(results));
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "gradients accumulate over micro-batches") {
  const bool forwards_first = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({8, 8});
    Tensors losses;
    for (int batch = 0; batch < 4; ++batch) {
      const auto guard = run.guard();
      losses.push_back(at::linear(in.constant({3, 8}), weight).sigmoid().pow(2).sum());
      if (!forwards_first) {
        losses.back().backward();
      }
    }
    for (const at::Tensor& loss : losses) {
      if (forwards_first) {
        loss.backward();
      }
    }
    return in.gradients();
  });
}

// Saves a tensor, an output and a non-tensor, and looks at what it saved twice.
struct Cubed : torch::autograd::Function<Cubed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double factor) {
    const at::Tensor out = x * x * x * factor;
    context->save_for_backward({x, out, at::Tensor()});
    context->saved_data["factor"] = factor;
    return out;
  }
  static torch::autograd::variable_list backward(AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto again = context->get_saved_variables();
    TORCH_CHECK(!saved[2].defined() && saved[0].equal(again[0]), "the same save gave two answers");
    return {gradients[0] * saved[0].square() * 3 * context->saved_data["factor"].toDouble() + saved[1] * 0,
            at::Tensor()};
  }
};

TEST_CASE_METHOD(NoLeak, "a custom function gets back what it saved") {
  const Forward forward = [](Inputs& in) { return Cubed::apply(in.activation({7, 3}), 0.5).sin(); };
  expect_parity(train(forward, true));
  expect_parity(train(forward, false));
}

}  // namespace
}  // namespace ebb
