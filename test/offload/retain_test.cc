// Backward again and again over one graph, and over what backward itself saved.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::grad;
using torch::autograd::variable_list;

at::Tensor network(Inputs& in) {
  at::Tensor x = in.activation({5, 8});
  for (int layer = 0; layer < 2; ++layer) {
    x = at::linear(x, in.leaf({8, 8})).tanh() * x.sin();
  }
  return x;
}

TEST_CASE_METHOD(NoLeak, "twenty passes over a retained graph fetch the same bytes each and leave none on the device") {
  Rig rig(late_without_stash());
  Inputs in;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = in.loss(network(in));
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

TEST_CASE_METHOD(NoLeak, "several roots with gradients of their own, some of them twice, are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor trunk = network(in);
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
        const at::Tensor loss = in.loss(network(in));
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
        const at::Tensor trunk = network(in).exp();
        const at::Tensor first = in.loss(trunk.sin());
        const at::Tensor second = in.loss(trunk.cos());
        first.backward();
        second.backward();
        return in.gradients();
      },
      "Trying to backward through the graph a second time");
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

TEST_CASE_METHOD(NoLeak, "a graph that is retained over many steps of another one keeps its bytes") {
  expect_parity([](const Run& run) {
    Inputs kept;
    auto guard = run.guard();
    const at::Tensor loss = kept.loss(network(kept));
    Tensors results;
    for (int step = 0; step < 6; ++step) {
      Inputs in;
      in.loss(network(in)).backward();
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
