// The user's own autograd functions: what they save comes back as LibTorch alone would bring it, and moves like any
// other save.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::grad;
using torch::autograd::variable_list;

// Saves neither an input nor an output, but a value on the way, which no node made.
struct SavesIntermediate : Function<SavesIntermediate> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor shifted = x + 2;
    const at::Tensor out = shifted.square();
    context->save_for_backward({shifted});
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0] * 2};
  }
};

TEST_CASE_METHOD(NoLeak, "a function gets back the intermediate value that it saved, from away") {
  expect_gradient_parity([](Inputs& in) { return SavesIntermediate::apply(in.activation({7, 3})).sin(); });
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor out;
  {
    const OffloadGuard guard(rig.offloader());
    out = SavesIntermediate::apply(in.leaf({6}));
  }
  CHECK(rig.stats().offloaded.bytes == 6 * sizeof(float));
  CHECK(rig.stats().saved_on_device.now_bytes == 0);
}

// Saves an input, a part of it, and the output.
struct SavesViews : Function<SavesViews> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor out = x.t().exp();
    context->save_for_backward({x, x.t(), x.narrow(0, 1, 1), out, x});
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    TORCH_CHECK(saved[1].strides()[0] == 1, "the transposed view came back contiguous");
    TORCH_CHECK(saved[0].t().equal(saved[1]) && saved[0].equal(saved[4]), "saves of one storage differ");
    return {(gradients[0] * saved[3]).t() + saved[2].sum() * 0};
  }
};

TEST_CASE_METHOD(NoLeak,
                 "a function that saves a tensor twice and in parts gets each with its own layout, from one copy") {
  expect_gradient_parity([](Inputs& in) { return SavesViews::apply(in.activation({4, 3})).sin(); });
  Rig rig(late());
  Inputs in;
  const at::Tensor x = in.activation({4, 3});
  const OffloadGuard guard(rig.offloader());
  SavesViews::apply(x);
  CHECK(rig.stats().saved.tensors == 5);
  CHECK(rig.stats().offloaded.tensors == 2);  // input and output
  CHECK(rig.stats().deduplicated.tensors == 3);
}

// Returns, and saves, a view of its second input.
struct SavesViewItReturns : Function<SavesViewItReturns> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor turned = weight.t();
    context->save_for_backward({turned});
    return {at::mm(x, turned), turned};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor turned = context->get_saved_variables()[0];
    return {at::mm(gradients[0], turned.t()), at::Tensor()};
  }
};

TEST_CASE_METHOD(NoLeak, "a function that saves the view of a parameter that it returns does not own itself") {
  expect_gradient_parity([](Inputs& in) {
    return SavesViewItReturns::apply(in.activation({4, 8}).sin(), in.leaf({6, 8}))[0].exp();
  });
  Rig rig(late_without_stash());
  {
    Inputs in;
    const OffloadGuard guard(rig.offloader());
    SavesViewItReturns::apply(in.activation({4, 8}).sin(), in.leaf({6, 8}));
  }
  CHECK(rig.stats().pool.now_bytes == 0);
}

// Values and indices of a sort; saves the indices, which have no gradient.
struct Sorted : Function<Sorted> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x) {
    const auto [values, indices] = at::sort(x, 0);
    context->mark_non_differentiable({indices});
    context->save_for_backward({indices});
    return {values, indices};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor indices = context->get_saved_variables()[0];
    return {at::zeros_like(gradients[0]).scatter_(0, indices, gradients[0])};
  }
};

TEST_CASE_METHOD(NoLeak, "a function that saves an output without gradient gets it back") {
  expect_gradient_parity([](Inputs& in) {
    const variable_list sorted = Sorted::apply(in.activation({9}));
    TORCH_CHECK(!sorted[1].requires_grad(), "indices have no gradient");
    return sorted[0].pow(2);
  });
}

// Changes its input, and saves it as its output.
struct ExpInPlace : Function<ExpInPlace> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x) {
    x.exp_();
    context->mark_dirty({x});
    context->save_for_backward({x});
    return x;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

TEST_CASE_METHOD(NoLeak, "a function that marks its input dirty and saves it gets back what it wrote") {
  expect_gradient_parity([](Inputs& in) { return ExpInPlace::apply(in.activation({5, 4}) + 1).sin(); });
}

TEST_CASE_METHOD(NoLeak, "a function that changes an input that others have saved gives LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.activation({5});
        const at::Tensor saved = x.sin();
        in.loss(saved + ExpInPlace::apply(x)).backward();
        return in.gradients();
      },
      "has been modified by an inplace operation");
}

TEST_CASE_METHOD(NoLeak, "what a function saved in place gives LibTorch's own error once it is written to again") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        at::Tensor out = ExpInPlace::apply(in.activation({5}) + 1);
        out.mul_(2);
        in.loss(out).backward();
        return in.gradients();
      },
      "has been modified by an inplace operation");
}

// Two outputs. Where a gradient is missing it says so instead of taking zeros.
struct SineAndCosine : Function<SineAndCosine> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x) {
    context->set_materialize_grads(false);
    context->save_for_backward({x});
    return {x.sin(), x.cos()};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    at::Tensor gradient = at::zeros_like(x);
    if (gradients[0].defined()) {
      gradient = gradient + gradients[0] * x.cos();
    }
    if (gradients[1].defined()) {
      gradient = gradient - gradients[1] * x.sin();
    }
    return {gradient};
  }
};

TEST_CASE_METHOD(NoLeak,
                 "a function of which only one output is used still gets its saves and no gradient for the other") {
  const std::size_t used = GENERATE(0, 1);
  expect_gradient_parity([=](Inputs& in) { return SineAndCosine::apply(in.activation({8}))[used].pow(2); });
}

TEST_CASE_METHOD(NoLeak, "the backward of a function is itself derived through what it saved") {
  const bool second_in_guard = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor x = in.leaf({6});
    const variable_list outs = SineAndCosine::apply(x * 1.5);
    const at::Tensor loss = in.loss(outs[0] * outs[1]);
    const at::Tensor first = grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    const at::Tensor second = grad({in.loss(first)}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    if (!second_in_guard) {
      guard.reset();
    }
    in.loss(second).backward();
    return Tensors{first.detach(), second.detach(), x.grad()};
  });
}

// Keeps its tensor where no hook looks.
struct KeepsItself : Function<KeepsItself> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->saved_data["x"] = x.detach();
    return x.square();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->saved_data["x"].toTensor() * 2};
  }
};

TEST_CASE_METHOD(NoLeak, "what a function keeps in its own data is not seen, and is as exact") {
  expect_parity(train([](Inputs& in) { return KeepsItself::apply(in.activation({8})).sin(); }, true));
  Rig rig(late());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  KeepsItself::apply(in.activation({8}));
  CHECK(rig.stats().saved.tensors == 0);
}

TEST_CASE_METHOD(NoLeak,
                 "a function's saves are gone after backward, and asking for them again is LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor loss = in.loss(SavesIntermediate::apply(in.activation({8})));
        loss.backward();
        loss.backward();
        return in.gradients();
      },
      "Trying to backward through the graph a second time");
}

// Solves y + 0.1 sin(y) = x by gradient descent on a graph of its own, in both directions.
struct Implicit : Function<Implicit> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::AutoGradMode with_grad(true);
    at::Tensor y = x.detach().clone();
    for (int i = 0; i < 5; ++i) {
      y = y.detach().requires_grad_();
      const at::Tensor error = (y + y.sin() * 0.1 - x.detach()).square().sum();
      y = y - grad({error}, {y})[0] * 0.4;
    }
    y = y.detach();
    context->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::AutoGradMode with_grad(true);
    const at::Tensor y = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor slope = grad({(y + y.sin() * 0.1).sum()}, {y})[0];
    return {gradients[0] / slope.detach()};
  }
};

TEST_CASE_METHOD(NoLeak, "a function that builds and derives graphs of its own in both passes keeps its gradients") {
  const Forward forward = [](Inputs& in) { return Implicit::apply(in.activation({8})).pow(2); };
  expect_parity(train(forward, true));
  expect_parity(train(forward, false));
}

// Notes what ebb holds on the device while its backward has its input at hand.
struct LooksAtStats : Function<LooksAtStats> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t offloader) {
    context->save_for_backward({x});
    context->saved_data["offloader"] = offloader;
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    auto& offloader = *reinterpret_cast<Offloader*>(context->saved_data["offloader"].toInt());
    offloader.drain();  // the stash lets go of it
    held = offloader.stats().saved_on_device.now_bytes;
    return {gradients[0] * 2, at::Tensor()};
  }
  static inline std::uint64_t held = 0;
};

TEST_CASE_METHOD(NoLeak, "what a node has got is counted as held until it has run, fetched or still in the stash") {
  const Setting setting = GENERATE(late(), late_without_stash());
  CAPTURE(setting.name);
  Rig rig(setting);
  Inputs in;
  at::Tensor out;
  {
    const OffloadGuard guard(rig.offloader());
    out = LooksAtStats::apply(in.activation({64}), reinterpret_cast<std::int64_t>(&rig.offloader()));
  }
  LooksAtStats::held = 0;
  out.sum().backward();
  CHECK(LooksAtStats::held == 64 * sizeof(float));
}

}  // namespace
}  // namespace ebb
