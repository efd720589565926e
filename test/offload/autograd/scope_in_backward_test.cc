// Guards that end, begin or are needed inside of a backward pass: in hooks, in custom functions, on the engine's
// threads.

#include <functional>
#include <memory>
#include <utility>

#include <ATen/Functions.h>
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

// Calls `hook` while the backward pass over x.sin() runs, between two nodes that unpack.
at::Tensor with_hook(const at::Tensor& x, std::function<void()> hook) {
  const at::Tensor y = x.sin();
  y.register_hook([hook = std::move(hook)](const at::Tensor& gradient) {
    hook();
    return gradient;
  });
  return y.exp();
}

TEST_CASE_METHOD(NoLeak, "a guard that ends in a hook is over for the rest of the backward pass and after it") {
  Rig rig(late_without_stash());
  Inputs in;
  auto guard = guard_on(rig);
  const at::Tensor x = in.leaf({8});
  std::uint64_t saved_at_end = 0;
  const at::Tensor loss = in.loss(with_hook(x, [&] {
    CHECK(seen_by(rig) == 1);
    guard.reset();
    saved_at_end = rig.stats().saved.tensors;
  }));
  const variable_list first = grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  CHECK(rig.stats().saved.tensors == saved_at_end);
  CHECK(seen_by(rig) == 0);
}

TEST_CASE_METHOD(NoLeak, "a guard that begins in a hook is not in force after the backward pass, though it lives") {
  Rig rig(late_without_stash());
  Inputs in;
  std::unique_ptr<OffloadGuard> guard;
  const at::Tensor loss = in.loss(with_hook(in.activation({8}), [&] {
    guard = guard_on(rig);
    CHECK(seen_by(rig) == 1);
  }));
  loss.backward();
  CHECK(seen_by(rig) == 0);
  guard.reset();
  CHECK(seen_by(rig) == 0);
}

TEST_CASE_METHOD(NoLeak, "gradients are exact when the guard ends in a hook in the middle of backward") {
  expect_parity([](const Run& run) {
    Inputs in;
    auto guard = run.guard();
    at::Tensor out = with_hook(three_layers(in), [&] { guard.reset(); });
    in.loss(out.pow(2)).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "gradients are exact when the offloader ends in a hook in the middle of backward") {
  const bool guard_too = GENERATE(false, true);
  const auto program = [&](std::unique_ptr<Offloader> offloader) {
    Inputs in;
    auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
    at::Tensor out = with_hook(three_layers(in), [&] {
      if (guard_too) {
        guard.reset();
      }
      offloader.reset();
    });
    in.loss(out.pow(2)).backward();
    return in.gradients();
  };
  const Tensors expected = program(nullptr);
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    const std::shared_ptr<SimulatedTier> tier = make_tier(setting);
    std::unique_ptr<Offloader> offloader = make_offloader(setting, tier);
    check_same({expected, ""}, {program(std::move(offloader)), ""});
    if (tier != nullptr) {
      CHECK(tier.use_count() == 1);
      CHECK(tier->pool_stats().now_bytes == 0);
      CHECK(tier->device_bytes().now == 0);
    }
  }
}

// Runs a backward pass inside its own, `depth` deep: from 60 on LibTorch moves to threads of its own.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = gradients[0].detach().requires_grad_();
    const at::Tensor y = depth > 0 ? Nested::apply(x, depth - 1) : (x * 2).pow(2);
    return {grad({y.sum()}, {x})[0], at::Tensor()};
  }
};

TEST_CASE_METHOD(NoLeak,
                 "a save on a thread of the engine's own, seventy backward passes deep, goes through the guard") {
  Rig rig(late_without_stash());
  const at::Tensor x = at::ones({4}).requires_grad_();
  const OffloadGuard guard(rig.offloader());
  Nested::apply(x, 70).sum().backward();
  CHECK(rig.stats().saved.tensors == 1);
  CHECK(rig.stats().offloaded.tensors == 1);
  CHECK(rig.stats().reused.tensors + rig.stats().fetched.tensors == 1);
  CHECK(at::equal(x.grad(), at::full({4}, 8.0)));
}

// Its backward enters a guard, uses what forward saved, and leaves again.
struct GuardedBackward : torch::autograd::Function<GuardedBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t run) {
    context->save_for_backward({x});
    context->saved_data["run"] = run;
    return x.pow(3);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& run = *reinterpret_cast<const Run*>(context->saved_data["run"].toInt());
    const auto guard = run.guard();
    const at::Tensor x = context->get_saved_variables()[0];
    return {gradients[0] * x.square() * 3, at::Tensor()};
  }
};

TEST_CASE_METHOD(NoLeak, "a guard inside a custom backward sees the saves of a double backward, and no others") {
  const bool guard_outside = GENERATE(false, true);
  const Program program = [=](const Run& run) {
    Inputs in;
    const auto guard = guard_outside ? run.guard() : nullptr;
    const at::Tensor x = in.leaf({6});
    const at::Tensor y = GuardedBackward::apply(x.sin(), reinterpret_cast<std::int64_t>(&run));
    const at::Tensor first = grad({in.loss(y)}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    in.loss(first).backward();
    return Tensors{first.detach(), x.grad()};
  };
  expect_parity(program);
  Rig rig(late_without_stash());
  (void)outcome(program, Run(&rig.offloader()));
  CHECK(rig.stats().offloaded.tensors > 0);
  CHECK(seen_by(rig) == 0);
}

}  // namespace
}  // namespace ebb
