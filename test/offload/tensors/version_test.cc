// In-place writes to saved tensors: the error that LibTorch gives without hooks, word for word, or none where it gives
// none.

#include <functional>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

constexpr const char* kError = "has been modified by an inplace operation";

struct Write {
  const char* how;
  std::function<void(at::Tensor&)> write;
};

const std::vector<Write>& writes() {
  static const std::vector<Write> writes{
      {"on the tensor", [](at::Tensor& x) { x.add_(1); }},
      {"twice", [](at::Tensor& x) { x.add_(1).mul_(2); }},
      {"through a view", [](at::Tensor& x) { x.narrow(0, 0, 1).zero_(); }},
      {"through detach", [](at::Tensor& x) { x.detach().fill_(3); }},
      {"through a view of a detached view", [](at::Tensor& x) { x.detach().t().select(0, 1).fill_(3); }},
      {"without gradients",
       [](at::Tensor& x) {
         const at::NoGradGuard no_grad;
         x.mul_(2);
       }},
  };
  return writes;
}

TEST_CASE_METHOD(NoLeak, "a write to a saved activation raises LibTorch's own error") {
  for (const Write& each : writes()) {
    INFO(each.how);
    expect_same_error(
        [&](const Run& run) {
          Inputs in;
          auto guard = run.guard();
          at::Tensor x = in.activation({3, 4});
          const at::Tensor loss = at::mm(x, in.leaf({4, 2})).sum() + x.pow(2).sum();
          guard.reset();
          each.write(x);
          loss.backward();
          return in.gradients();
        },
        kError);
  }
}

TEST_CASE_METHOD(NoLeak, "a write to a saved view raises LibTorch's own error") {
  for (const Write& each : writes()) {
    INFO(each.how);
    expect_same_error(
        [&](const Run& run) {
          Inputs in;
          auto guard = run.guard();
          at::Tensor x = in.activation({6, 6});
          const at::Tensor loss = x.narrow(0, 1, 3).t().pow(2).sum();
          guard.reset();
          each.write(x);
          loss.backward();
          return in.gradients();
        },
        kError, Words::kButProducer);
  }
}

TEST_CASE_METHOD(NoLeak, "a write to a saved parameter raises LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor weight = in.leaf({4, 4});
        const at::Tensor loss = at::linear(in.activation({3, 4}), weight).pow(2).sum();
        {
          const at::NoGradGuard no_grad;
          weight.mul_(0.5);  // an optimizer that steps before backward
        }
        loss.backward();
        return in.gradients();
      },
      kError);
}

TEST_CASE_METHOD(NoLeak, "a write to a saved constant raises LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        at::Tensor factor = in.constant({4});
        const at::Tensor loss = (in.activation({4}) * factor).sum();
        factor.add_(1);
        loss.backward();
        return in.gradients();
      },
      kError);
}

TEST_CASE_METHOD(NoLeak, "a write to an output that its operation saved raises LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        at::Tensor out = in.activation({4, 2}).exp();
        const at::Tensor loss = out.sum();
        out.zero_();
        loss.backward();
        return in.gradients();
      },
      kError);
}

TEST_CASE_METHOD(NoLeak, "a write to an activation that the policy kept is an error as any other") {
  Setting setting = late();
  setting.options.policy = callback([](const Candidate&) { return Decision::kKeep; });
  Rig rig(setting);
  Inputs in;
  at::Tensor x = in.activation({3, 4});
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = x.pow(2).sum();
  }
  CHECK(rig.stats().kept_for(KeptReason::kPolicy).tensors == 1);
  x.add_(1);
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains(kError));
}

TEST_CASE_METHOD(NoLeak, "a write between two passes over a retained graph raises the error in the second one") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        at::Tensor x = in.activation({3, 4});
        const at::Tensor loss = x.pow(2).sum();
        loss.backward({}, /*retain_graph=*/true);
        TORCH_CHECK(in.gradients()[0].defined(), "the first pass must succeed");
        x.add_(1);
        loss.backward();
        return in.gradients();
      },
      kError, Words::kButProducer);
}

TEST_CASE_METHOD(NoLeak, "a write after a save that backward does not ask for is no error") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({3, 4});
    at::Tensor y = x.sin();
    const at::Tensor unused = y.pow(2);
    x = at::Tensor();
    y.add_(1);
    in.loss(y).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a write to a part of the graph that saved nothing is no error") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({3, 4});
    at::Tensor y = x + 1;
    const at::Tensor squared = y.pow(2);
    x.mul_(3);
    in.loss(squared + x).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "after the error everything is given back and the next step is exact") {
  const Program good = train([](Inputs& in) { return in.activation({3, 4}).pow(2).exp(); }, true);
  const Program bad = [](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    at::Tensor x = in.activation({3, 4}).exp();
    const at::Tensor loss = (x.sin() * x.cos()).pow(2).sum();
    x.add_(1);
    loss.backward();
    return in.gradients();
  };
  const Outcome expected = plain(good);
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    for (int step = 0; step < 3; ++step) {
      CHECK_THAT(outcome(bad, Run(&rig.offloader())).error, Catch::Contains(kError));
      rig.check_empty();
      check_same(expected, outcome(good, Run(&rig.offloader())));
    }
  }
}

}  // namespace
}  // namespace ebb
