// Writes to what was saved, wherever the save is by then: always the error that LibTorch gives without hooks.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::grad;

constexpr const char* kError = "has been modified by an inplace operation";

using Write = std::function<void(const at::Tensor&)>;

// Ways to a tensor's bytes that autograd follows.
const std::vector<std::pair<std::string, Write>>& writes() {
  static const std::vector<std::pair<std::string, Write>> writes{
      {"on the tensor", [](const at::Tensor& x) { x.add_(1); }},
      {"through a view", [](const at::Tensor& x) { x.view({-1}).narrow(0, 0, 1).zero_(); }},
      {"through detach", [](const at::Tensor& x) { x.detach().mul_(2); }},
      {"as an operation's output",
       [](const at::Tensor& x) {
         const at::NoGradGuard no_grad;
         at::Tensor out = x;
         at::sub_out(out, x, at::ones_like(x));
       }},
      {"as one of a list of tensors",
       [](const at::Tensor& x) {
         const at::NoGradGuard no_grad;
         at::_foreach_mul_({x, at::ones({2})}, 2.0);
       }},
  };
  return writes;
}

struct Placement {
  Setting setting;
  std::function<void(const Run&, const at::Tensor&)> before_save = [](const Run&, const at::Tensor&) {};
  std::function<void(const Stats&)> placed;  // checks that it is where it should be
};

// Saves a tensor, writes to it, and expects the error of plain autograd, for every way of writing.
void expect_error_at(const Placement& placement) {
  for (const auto& [how, write] : writes()) {
    INFO(how);
    const Program program = [&, &write = write](const Run& run) {
      Inputs in;
      const at::Tensor x = in.activation({3, 4});
      placement.before_save(run, x);
      auto guard = run.guard();
      const at::Tensor loss = x.pow(2).sum();
      guard.reset();
      if (run.offloader() != nullptr) {
        placement.placed(run.offloader()->stats());
      }
      write(x);
      loss.backward();
      return in.gradients();
    };
    const Outcome expected = plain(program);
    REQUIRE_THAT(expected.error, Catch::Contains(kError));
    Rig rig(placement.setting);
    check_same(expected, outcome(program, Run(&rig.offloader())));
    rig.check_empty();
  }
}

TEST_CASE_METHOD(NoLeak, "a write to a save whose copy out has yet to run is LibTorch's own error") {
  expect_error_at({.setting = late(), .placed = [](const Stats& stats) { CHECK(stats.stash.now_bytes > 0); }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save that has left the device is LibTorch's own error") {
  expect_error_at({.setting = late_without_stash(), .placed = [](const Stats& stats) {
                     CHECK(stats.stash.now_bytes == 0);
                     CHECK(stats.saved_on_device.now_bytes == 0);
                     CHECK(stats.pool.now_bytes > 0);
                   }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save that has gone to disk is LibTorch's own error") {
  expect_error_at({.setting = disk(), .placed = [](const Stats& stats) {
                     CHECK(stats.saved_on_device.now_bytes == 0);
                     CHECK(stats.pool.now_bytes > 0);
                   }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save that the policy kept is LibTorch's own error") {
  Setting setting = late();
  setting.options.policy = callback([](const Candidate&) { return Decision::kKeep; });
  expect_error_at({.setting = setting,
                   .placed = [](const Stats& stats) { CHECK(stats.kept_for(KeptReason::kPolicy).tensors == 1); }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save for which there was no room is LibTorch's own error") {
  Setting setting = late();
  setting.options.capacity_bytes = 40;  // the tensor has 48
  expect_error_at({.setting = setting,
                   .placed = [](const Stats& stats) { CHECK(stats.kept_for(KeptReason::kNoRoom).tensors == 1); }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save of an excluded tensor is LibTorch's own error") {
  expect_error_at({.setting = late(),
                   .before_save =
                       [](const Run& run, const at::Tensor& x) {
                         if (run.offloader() != nullptr) {
                           run.offloader()->exclude(x);
                         }
                       },
                   .placed = [](const Stats& stats) { CHECK(stats.kept_for(KeptReason::kExcluded).tensors == 1); }});
}

TEST_CASE_METHOD(NoLeak, "a write to a save that has been prefetched is LibTorch's own error") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor x = in.activation({3, 4});
    at::Tensor other_loss;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = x.pow(2).sum();
      other_loss = in.activation({3, 4}).exp().sum();
    }
    const at::Tensor alias = x.detach();
    x.reset();
    if (run.offloader() != nullptr) {
      run.offloader()->drain();
    }
    other_loss.backward();
    if (run.offloader() != nullptr) {
      CHECK(run.offloader()->stats().window.now_bytes > 0);
    }
    alias.add_(1);
    loss.backward();
    return in.gradients();
  };
  const Outcome expected = plain(program);
  REQUIRE_THAT(expected.error, Catch::Contains(kError));
  Rig rig(late_without_stash());
  CHECK_THAT(outcome(program, Run(&rig.offloader())).error, Catch::Contains(kError));
}

TEST_CASE_METHOD(NoLeak, "a write to a saved index or mask is LibTorch's own error, with the type's own name") {
  const bool mask = GENERATE(false, true);
  expect_same_error(
      [=](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.activation({4, 3});
        const at::Tensor index = mask ? x.detach() > 0 : at::zeros({4, 3}, at::kLong);
        const at::Tensor out = mask ? at::where(index, x, -x) : x.gather(0, index);
        index.zero_();
        in.loss(out).backward();
        return in.gradients();
      },
      mask ? "CPUBoolType" : "CPULongType");
}

TEST_CASE_METHOD(NoLeak, "a write through the real part of a saved complex tensor is LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.activation({4}, at::kComplexFloat);
        const at::Tensor loss = at::real(x * x.conj()).sum();
        at::real(x.detach()).zero_();
        loss.backward();
        return in.gradients();
      },
      kError, Words::kButProducer);
}

TEST_CASE_METHOD(NoLeak, "a write to a tensor whose sibling part was saved is LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.activation({4, 6});
        const at::Tensor loss = x.narrow(1, 0, 3).pow(2).sum();
        x.narrow(1, 3, 3).zero_();  // other bytes, the same version counter
        loss.backward();
        return in.gradients();
      },
      kError, Words::kButProducer);
}

TEST_CASE_METHOD(NoLeak,
                 "a write to the output of softmax, of relu_ or of a matrix product's chain is LibTorch's own error") {
  const auto make = GENERATE(
      as<std::function<at::Tensor(at::Tensor)>>{}, [](at::Tensor x) { return x.softmax(1); },
      [](at::Tensor x) { return x.relu_(); }, [](at::Tensor x) { return x.sigmoid().tanh(); });
  expect_same_error(
      [&](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor out = make(at::mm(in.activation({3, 4}), in.leaf({4, 4})));
        const at::Tensor loss = in.loss(out);
        out.detach().neg_();
        loss.backward();
        return in.gradients();
      },
      kError);
}

TEST_CASE_METHOD(NoLeak,
                 "a write to what a backward pass has saved fails the double backward with LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.leaf({4});
        const at::Tensor y = x * 1.5;
        const at::Tensor first = grad({y.pow(3).sum()}, {y}, {}, true, /*create_graph=*/true)[0];
        y.detach().add_(1);
        first.sum().backward();
        return in.gradients();
      },
      kError);
}

TEST_CASE_METHOD(NoLeak, "the error names the gap between the versions, also after many writes") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        at::Tensor x = in.activation({4});
        x.add_(1).add_(1);
        const at::Tensor loss = x.pow(2).sum();
        for (int i = 0; i < 5; ++i) {
          x.detach().mul_(2);
        }
        loss.backward();
        return in.gradients();
      },
      "is at version 7; expected version 2 instead");
}

// Anomaly detection warns with a trace of the forward pass.
class Unheard final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

TEST_CASE_METHOD(NoLeak, "with anomaly detection on, the error has the hint that belongs to it") {
  Unheard unheard;
  const c10::WarningUtils::WarningHandlerGuard warnings(&unheard);
  torch::autograd::AnomalyMode::set_enabled(true, /*check_nan=*/false);
  const std::shared_ptr<void> off(nullptr, [](void*) { torch::autograd::AnomalyMode::set_enabled(false); });
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor x = in.activation({4});
        const at::Tensor loss = x.pow(2).sum();
        x.add_(1);
        loss.backward();
        return in.gradients();
      },
      "Good luck!");
}

TEST_CASE_METHOD(NoLeak,
                 "an optimizer that steps on the weights themselves before backward gives LibTorch's own error") {
  expect_same_error(
      [](const Run& run) {
        Inputs in;
        const auto guard = run.guard();
        const at::Tensor weight = in.leaf({8, 8});
        const at::Tensor hidden = at::linear(in.activation({4, 8}), weight).sigmoid();
        const at::Tensor loss = in.loss(at::linear(hidden, weight));
        {
          const at::NoGradGuard no_grad;
          at::_foreach_add_({weight}, -0.1);
        }
        loss.backward();
        return in.gradients();
      },
      kError);
}

}  // namespace
}  // namespace ebb
