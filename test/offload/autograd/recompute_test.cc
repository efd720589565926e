// Segments that are computed without a graph and once more in backward, as torch.utils.checkpoint does it, and
// autocast.

#include <functional>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using Segment = std::function<at::Tensor(const at::Tensor&)>;

// Holds a segment for as long as the graph that will compute it again.
struct HeldSegment : torch::CustomClassHolder {
  explicit HeldSegment(Segment segment) : run(std::move(segment)) {}
  const Segment run;
};

struct Recomputed : Function<Recomputed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<HeldSegment>& held) {
    context->save_for_backward({x});
    context->saved_data["segment"] = c10::IValue::make_capsule(held);
    return held->run(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto held = c10::static_intrusive_pointer_cast<HeldSegment>(context->saved_data["segment"].toCapsule());
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    held->run(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

at::Tensor recomputed(const at::Tensor& x, Segment segment) {
  return Recomputed::apply(x, c10::make_intrusive<HeldSegment>(std::move(segment)));
}

Segment layer(at::Tensor weight) {
  return [weight = std::move(weight)](const at::Tensor& x) { return at::linear(x, weight).sigmoid() * x.sin(); };
}

TEST_CASE_METHOD(NoLeak, "recomputed segments have exact gradients with backward under the guard and outside of it") {
  const Forward forward = [](Inputs& in) {
    at::Tensor x = in.activation({5, 8});
    for (int i = 0; i < 3; ++i) {
      x = recomputed(x, layer(in.leaf({8, 8}))).tanh();
    }
    return x;
  };
  expect_gradient_parity(forward);
}

TEST_CASE_METHOD(NoLeak, "segments recomputed inside recomputed segments have exact gradients") {
  const Forward forward = [](Inputs& in) {
    const at::Tensor inner = in.leaf({8, 8});
    const at::Tensor outer = in.leaf({8, 8});
    const Segment nested = [=](const at::Tensor& x) {
      const at::Tensor deepest =
          recomputed(x.exp() * 0.1, [=](const at::Tensor& y) { return recomputed(y, layer(inner)).cos(); });
      return layer(outer)(deepest);
    };
    return recomputed(in.activation({5, 8}), nested);
  };
  expect_gradient_parity(forward);
}

TEST_CASE_METHOD(NoLeak, "a recomputed segment saves only its input in forward, and its inside in backward") {
  Rig rig(late_without_stash());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor out = recomputed(in.activation({8}), [](const at::Tensor& x) { return x.sin().exp().pow(2); });
  CHECK(rig.stats().saved.tensors == 1);
  CHECK(rig.stats().offloaded.bytes == 8 * sizeof(float));
  out.sum().backward();
  CHECK(rig.stats().saved.tensors == 1 + 3);  // sin's input is a leaf there; exp's output and pow's input are one
  CHECK(rig.stats().kept_for(KeptReason::kParameter).tensors == 1);
  CHECK(rig.stats().offloaded.tensors == 1 + 1);
  CHECK(rig.stats().steps == 1);
}

TEST_CASE_METHOD(NoLeak, "a segment that enters a guard of its own is exact, whether one is around it or not") {
  const bool around = GENERATE(false, true);
  const bool around_backward = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    auto guard = around ? run.guard() : nullptr;
    const Segment plain_segment = layer(in.leaf({8, 8}));
    const at::Tensor out = recomputed(in.activation({5, 8}), [&](const at::Tensor& x) {
      const auto inside = run.guard();
      return plain_segment(x).exp();
    });
    const at::Tensor loss = in.loss(out);
    guard.reset();
    guard = around_backward ? run.guard() : nullptr;
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a recomputed segment in a retained graph is exact in every pass") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor loss = in.loss(recomputed(in.activation({5, 8}), layer(in.leaf({8, 8}))).exp());
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "an error while a segment is recomputed arrives with its text, and the next step is exact") {
  bool fail = false;
  const auto program = [&](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const Segment inner = layer(in.leaf({8, 8}));
    const at::Tensor out = recomputed(in.activation({5, 8}), [&](const at::Tensor& x) {
      const at::Tensor hidden = inner(x).exp();
      TORCH_CHECK(!fail || !at::GradMode::is_enabled(), "the segment failed when it was computed again");
      return hidden.sin();
    });
    in.loss(out).backward();
    return in.gradients();
  };
  const Outcome expected = plain(program);
  for (const Setting& setting : all_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    fail = true;
    CHECK_THAT(outcome(program, Run(&rig.offloader())).error, Catch::Contains("failed when it was computed again"));
    rig.check_empty();
    fail = false;
    check_same(expected, outcome(program, Run(&rig.offloader())));
  }
}

class Autocast {
 public:
  explicit Autocast(bool enabled = true) : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const bool before_;
};

// Uses each weight twice, so that the second use takes the cast from autocast's cache.
at::Tensor mixed_network(Inputs& in, const at::Tensor& weight) {
  at::Tensor x = in.activation({5, 8});
  for (int i = 0; i < 2; ++i) {
    x = at::linear(x, weight).sigmoid();
  }
  const Autocast off(false);
  return x.to(at::kFloat).pow(2);
}

TEST_CASE_METHOD(NoLeak, "under autocast, with its cache of cast weights, gradients are exact") {
  const bool guard_outside = GENERATE(false, true);
  const bool backward_in_autocast = GENERATE(false, true);
  expect_parity([=](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({8, 8});
    at::Tensor loss;
    auto guard = guard_outside ? run.guard() : nullptr;
    {
      const Autocast autocast;
      const auto inside = guard_outside ? nullptr : run.guard();
      loss = in.loss(mixed_network(in, weight));
      if (backward_in_autocast) {
        loss.backward();
      }
    }
    if (!backward_in_autocast) {
      loss.backward();
    }
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a weight that autocast has cast once leaves the device in one copy for all its uses") {
  Rig rig(late_without_stash());
  Inputs in;
  const at::Tensor weight = in.leaf({16, 16});
  const at::Tensor x = in.activation({5, 16});
  const OffloadGuard guard(rig.offloader());
  const Autocast autocast;
  const at::Tensor first = at::mm(x, weight);
  const Stats once = rig.stats();
  const at::Tensor second = at::mm(x.sin(), weight);
  CHECK(rig.stats().deduplicated.bytes - once.deduplicated.bytes == 16 * 16 * sizeof(at::BFloat16));
  in.loss(first * second).backward();
  CHECK(at::isfinite(weight.grad()).all().item<bool>());
}

TEST_CASE_METHOD(NoLeak, "recomputed segments under autocast are exact") {
  expect_parity([](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const Autocast autocast;
    const Segment inner = layer(in.leaf({8, 8}));
    const at::Tensor out = recomputed(in.activation({5, 8}), [&](const at::Tensor& x) {
      const Autocast again;  // backward runs with the autocast of its caller, and another cache
      return inner(x).to(at::kFloat);
    });
    in.loss(out).backward();
    return in.gradients();
  });
}

}  // namespace
}  // namespace ebb
