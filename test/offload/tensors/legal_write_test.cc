// Writes that autograd allows: no error where LibTorch gives none, and no copy in flight that takes them for what was
// saved.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

using Chain = std::function<at::Tensor(at::Tensor)>;

TEST_CASE_METHOD(NoLeak, "in-place operations on what nobody has saved are legal and keep their gradients") {
  static const std::vector<std::pair<std::string, Chain>> chains{
      {"relu_", [](at::Tensor x) { return x.relu_(); }},
      {"sigmoid_", [](at::Tensor x) { return x.sigmoid_(); }},
      {"tanh_", [](at::Tensor x) { return x.tanh_(); }},
      {"mul_, add_ and exp_", [](at::Tensor x) { return x.mul_(0.1).add_(-1).exp_(); }},
      {"clamp_, which saves its input as it was", [](at::Tensor x) { return x.clone().clamp_(-0.5, 0.5); }},
      {"leaky_relu_", [](at::Tensor x) { return at::leaky_relu_(x, 0.2); }},
      {"mul_ by a tensor", [](at::Tensor x) { return x.mul_(at::full({8}, 0.3)); }},
      {"addcmul_", [](at::Tensor x) { return x.addcmul_(at::full({8}, 0.3), at::full({8}, 2.0)); }},
      {"masked_fill_", [](at::Tensor x) { return x.masked_fill_(at::arange(8) > 3, 0.5); }},
      {"index_put_",
       [](at::Tensor x) {
         return x.index_put_({at::tensor({0, 2})}, at::ones({2, 8}));
       }},
      {"in the part of a view",
       [](at::Tensor x) {
         x.select(1, 3).mul_(2);
         x.narrow(0, 1, 2).sigmoid_();
         return x;
       }},
      {"through a transposed view", [](at::Tensor x) { return x.t().tanh_().t(); }},
      {"a residual sum", [](at::Tensor x) { return (x * 0.5).add_(x).relu_(); }},
  };
  for (const auto& [name, chain] : chains) {
    INFO(name);
    const Forward forward = [&, &chain = chain](Inputs& in) {
      const at::Tensor hidden = chain(at::linear(in.activation({5, 8}), in.leaf({8, 8})));
      return chain(at::linear(hidden, in.leaf({8, 8}))).sin();
    };
    expect_parity(train(forward, true));
    expect_parity(train(forward, false));
  }
}

TEST_CASE_METHOD(NoLeak, "a buffer that is filled part by part under the guard keeps the gradients of all parts") {
  expect_gradient_parity([](Inputs& in) {
    const at::Tensor buffer = at::zeros({6, 4});
    for (int row = 0; row < 6; ++row) {
      buffer.select(0, row).copy_(in.activation({4}).tanh());
    }
    return buffer.pow(2).sigmoid_();
  });
}

TEST_CASE_METHOD(NoLeak, "writes after backward are no error and do not reach into its gradients") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({3, 4});
    at::Tensor out = x.sigmoid();
    in.loss(x * out).backward();
    x.detach().zero_();
    out.detach().zero_();
    Tensors results = in.gradients();
    in.loss((in.activation({3, 4}) + x.detach()).exp()).backward();
    for (at::Tensor& gradient : in.gradients()) {
      results.push_back(std::move(gradient));
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak, "a write between the save that is dropped and the save that is used tears neither") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({64, 64});
    for (int i = 0; i < 4; ++i) {
      { const at::Tensor dropped = x.pow(2); }
      x.mul_(1.25);
    }
    at::Tensor y = x.pow(2);
    x.reset();
    in.loss(y).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a write to a tensor that only an unused branch has saved tears no copy that is used") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({16});
    const at::Tensor y = x.sin();
    const at::Tensor unused = y.pow(2).sum();
    y.mul_(2);  // the unused branch is lost by this, the other one is not
    const at::Tensor used = y.exp();
    in.loss(used).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a write to a save whose gradient is never asked for is no error") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    const at::Tensor a = in.leaf({4});
    const at::Tensor b = in.leaf({4});
    const at::Tensor hidden = b * 2;
    const at::Tensor of_a = a.sin().sum();
    const at::Tensor of_b = hidden.pow(2).sum();
    guard.reset();
    hidden.detach().zero_();
    return Tensors{grad({of_a + of_b}, {a})[0]};
  });
}

TEST_CASE_METHOD(NoLeak, "a tensor that is saved, written to and saved again for each of many steps is exact in each") {
  expect_parity([](const Run& run) {
    Tensors results;
    const at::Tensor state = at::ones({32});
    for (int step = 0; step < 4; ++step) {
      Inputs in;
      const auto guard = run.guard();
      in.loss(in.activation({32}) * state).backward();
      state.add_(1);  // after backward: a running statistic
      results.push_back(in.gradients()[0]);
    }
    return results;
  });
}

TEST_CASE_METHOD(NoLeak,
                 "LibTorch's optimizers write past the versions, so a step before backward is no error here either") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor weight = in.leaf({8, 8});
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1).momentum(0.9));
    const at::Tensor x = in.activation({4, 8});
    in.loss(at::linear(x, weight).sigmoid()).backward();
    const at::Tensor loss = in.loss(at::linear(at::linear(x, weight).sigmoid(), weight));
    optimizer.step();
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak,
                 "a write through data() to a saved weight is no error, and backward sees it as it does without ebb") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor weight = in.leaf({8, 8});
    const at::Tensor loss = in.loss(at::mm(in.activation({4, 8}), weight.t()));
    weight.data().mul_(0.5);
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a write through data() to a saved activation is no error, wherever the save is") {
  expect_parity([](const Run& run) {  // its gradient is promised to nobody
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({8});
    const at::Tensor loss = x.pow(2).sum();
    x.data().mul_(0.5);
    loss.backward();
    TORCH_CHECK(in.gradients()[0].defined(), "no gradient");
    return Tensors{};
  });
}

TEST_CASE_METHOD(NoLeak, "a weight that is given other data keeps the gradients of the data that backward finds") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor weight = in.leaf({8, 8});
    const at::Tensor loss = in.loss(at::mm(in.activation({4, 8}), weight));
    weight.set_data(weight.detach() * 3);
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "noise that is drawn in place before it is used is the noise of the gradient") {
  expect_gradient_parity([](Inputs& in) {
    at::Generator random = at::detail::createCPUGenerator(/*seed_val=*/5);
    const at::Tensor x = in.activation({64});
    const at::Tensor mask = at::empty({64});
    mask.bernoulli_(0.5, random);
    const at::Tensor noise = at::empty({64}).normal_(0, 1, random);
    return (x * mask + x * noise).sin();
  });
}

}  // namespace
}  // namespace ebb
