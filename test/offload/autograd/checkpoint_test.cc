// Regions whose saves are dropped, and made again by running them once more.

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <catch2/catch.hpp>

#include "offload/checkpoint.h"
#include "policy/policies.h"
#include "test/offload/parity.h"
#include "test/simulated/simulated_device_allocator.h"

namespace ebb {
namespace {

// Runs it as a region where the program runs with ebb, and as it is where not.
at::Tensor region(const Run& run, const CheckpointedFunction& function, const Tensors& inputs,
                  EarlyStop early_stop = EarlyStop::kNo) {
  return run.offloader() == nullptr ? function(inputs)[0] : checkpoint(function, inputs, early_stop)[0];
}

std::uint64_t device_bytes() { return dynamic_cast<SimulatedDeviceAllocator&>(*c10::GetCPUAllocator()).bytes().now; }

CheckpointedFunction gated(Inputs& in, std::int64_t width = 16) {
  const at::Tensor gate = in.leaf({24, width});
  const at::Tensor up = in.leaf({24, width});
  const at::Tensor down = in.leaf({width, 24});
  return [=](const Tensors& x) -> Tensors {
    return {at::linear(at::silu(at::linear(x[0], gate)) * at::linear(x[0], up).tanh(), down)};
  };
}

// Two regions one after another, under a guard.
Tensors two_regions(const Run& run, bool backward_in_guard) {
  Inputs in;
  const CheckpointedFunction first = gated(in);
  const CheckpointedFunction second = gated(in);
  auto guard = run.guard();
  const at::Tensor loss = in.loss(region(run, second, {region(run, first, {in.activation({4, 16})}).sin()}).pow(2));
  if (!backward_in_guard) {
    guard = nullptr;
  }
  loss.backward();
  return in.gradients();
}

TEST_CASE_METHOD(NoLeak, "a checkpointed region has the gradients of plain autograd") {
  const bool backward_in_guard = GENERATE(true, false);
  expect_parity([&](const Run& run) { return two_regions(run, backward_in_guard); });
}

TEST_CASE_METHOD(NoLeak, "a region needs no offloader") {
  const auto gradients = [](bool checkpointed) {
    Inputs in;
    const CheckpointedFunction function = gated(in);
    const Tensors inputs{in.activation({4, 16})};
    in.loss(checkpointed ? checkpoint(function, inputs)[0] : function(inputs)[0]).backward();
    return Outcome{in.gradients(), ""};
  };
  check_same(gradients(false), gradients(true));
}

TEST_CASE_METHOD(NoLeak, "of a region only the inputs are saved, and they move") {
  Rig rig(late_without_stash());
  int runs = 0;
  const Stats stats = counted(rig, [&](Inputs& in) {
    const CheckpointedFunction inner = gated(in);
    return checkpoint(
        [&runs, inner](const Tensors& x) {
          ++runs;
          return inner(x);
        },
        {in.activation({4, 16})})[0];
  });
  CHECK(stats.offloaded.tensors == 1);
  CHECK(stats.fetched.tensors == 1);
  CHECK(stats.saved.tensors == 1);
  CHECK(runs == 2);
}

TEST_CASE_METHOD(NoLeak, "what a region saves takes no memory until backward, and goes as it is used") {
  constexpr std::uint64_t kBytes = 256 * 256 * sizeof(float);
  Inputs in;
  const at::Tensor x = in.leaf({256, 256});
  const std::uint64_t before = device_bytes();
  at::Tensor sum = checkpoint(
      [](const Tensors& inputs) -> Tensors {
        at::Tensor y = inputs[0];
        for (int i = 0; i < 8; ++i) {
          y = y.sin();
        }
        return {y.sum()};
      },
      {x})[0];
  CHECK(device_bytes() - before < kBytes);
  sum.backward();
  sum.reset();
  CHECK(device_bytes() - before < 2 * kBytes);  // the gradient
}

TEST_CASE_METHOD(NoLeak, "a second run holds nothing for saves that have ended") {
  constexpr std::uint64_t kBytes = 64 * 64 * sizeof(float);
  Inputs in;
  const at::Tensor x = in.leaf({64, 64});
  const std::uint64_t before = device_bytes();
  const Tensors both = checkpoint(
      [](const Tensors& inputs) -> Tensors {
        return {inputs[0].sin().cos().sin().sum(), inputs[0].tan().sum()};
      },
      {x});
  both[0].backward();
  both[1].backward({}, /*retain_graph=*/true);
  both[1].backward({}, /*retain_graph=*/true);  // runs it again
  CHECK(device_bytes() - before < 2 * kBytes);  // the gradient
}

TEST_CASE_METHOD(NoLeak, "regions nest") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction inner = gated(in);
    const at::Tensor scale = in.leaf({16});
    const CheckpointedFunction outer = [&run, inner, scale](const Tensors& x) -> Tensors {
      return {region(run, inner, {x[0] * scale}).sin() * x[0]};
    };
    const auto guard = run.guard();
    in.loss(region(run, outer, {in.activation({4, 16})})).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a region under a guard inside a region is still the outer region's") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction function = gated(in);
    const auto guarded = [&run, function](const Tensors& x) {
      const auto inner = run.guard();
      const auto no_op = run.no_op();
      return function(x);
    };
    in.loss(region(run, guarded, {in.activation({4, 16})})).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "what is saved under a guard inside a region does not go to that guard's offloader") {
  Rig rig(late_without_stash());
  const Stats stats = counted(rig, [&rig](Inputs& in) {
    const CheckpointedFunction function = [&rig](const Tensors& x) -> Tensors {
      const OffloadGuard inner(rig.offloader());
      return {x[0].sin().cos()};
    };
    return checkpoint(function, {in.activation({8})})[0];
  });
  CHECK(stats.saved.tensors == 1);  // the input
}

TEST_CASE_METHOD(NoLeak, "dropout in a region drops the same values again, and leaves the random state alone") {
  expect_parity([](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({16, 16});
    at::manual_seed(3);
    const CheckpointedFunction function = [weight](const Tensors& x) -> Tensors {
      return {at::dropout(at::linear(at::dropout(x[0], 0.5, true).sin(), weight), 0.3, true)};
    };
    const auto guard = run.guard();
    const at::Tensor loss = in.loss(region(run, function, {in.activation({4, 16})}));
    const at::Tensor between = at::rand({4});
    loss.backward();
    Tensors result = in.gradients();
    result.push_back(between);
    result.push_back(at::rand({4}));
    return result;
  });
}

TEST_CASE_METHOD(NoLeak, "under autocast a region runs again in the precision of the forward pass") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction function = gated(in);
    at::Tensor loss;
    {
      const auto guard = run.guard();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      loss = in.loss(region(run, function, {in.activation({4, 16})}).to(at::kFloat));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
    loss.backward();
    CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a retained graph runs its regions again at each backward") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction function = gated(in);
    const auto guard = run.guard();
    const at::Tensor loss = in.loss(region(run, function, {in.activation({4, 16})}));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a derivative of a derivative goes through a region") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction function = gated(in);
    const auto guard = run.guard();
    const at::Tensor x = in.activation({4, 16});
    const at::Tensor loss = region(run, function, {x}).pow(3).sum();
    const at::Tensor gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    gradient.pow(2).sum().backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "several regions may be gone through in any order, and in part") {
  expect_parity([](const Run& run) {
    Inputs in;
    const CheckpointedFunction first = gated(in);
    const CheckpointedFunction second = gated(in);
    const auto guard = run.guard();
    const at::Tensor x = in.activation({4, 16});
    const at::Tensor a = region(run, first, {x}).sum();
    const at::Tensor b = region(run, second, {x}).sum();
    const at::Tensor part = torch::autograd::grad({a}, {x}, {}, /*retain_graph=*/true)[0];
    b.backward({}, /*retain_graph=*/true);
    a.backward();
    Tensors result = in.gradients();
    result.push_back(part);
    return result;
  });
}

TEST_CASE_METHOD(NoLeak, "a region may take several inputs, of any kind, and give several results") {
  expect_parity([](const Run& run) {
    Inputs in;
    const at::Tensor index = at::arange(4).flip({0});
    const CheckpointedFunction function = [](const Tensors& x) -> Tensors {
      return {x[0].index_select(0, x[1]).sin() * x[2], x[2].cos() * x[0]};
    };
    const Tensors inputs{in.activation({4, 3}), index, in.leaf({3}), at::Tensor()};
    const auto guard = run.guard();
    const Tensors both = run.offloader() == nullptr ? function(inputs) : checkpoint(function, inputs);
    in.loss(both[0] * both[1]).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "an input that is written to raises LibTorch's error") {
  const Program program = [](const Run& run) {
    Inputs in;
    const auto guard = run.guard();
    const at::Tensor x = in.activation({8});
    const at::Tensor loss = region(run, [](const Tensors& y) -> Tensors { return {y[0].sin()}; }, {x}).sum();
    {
      const at::NoGradGuard no_grad;
      x.add_(1);
    }
    loss.backward();
    return in.gradients();
  };
  expect_same_error(program, "modified by an inplace operation", Words::kButProducer);
}

TEST_CASE_METHOD(NoLeak, "a function that saves something else the second time is one clear error") {
  const bool fewer = GENERATE(true, false);
  Inputs in;
  int runs = 0;
  const at::Tensor loss = checkpoint(
      [&runs, fewer](const Tensors& x) -> Tensors {
        const bool first = runs++ == 0;
        at::Tensor y = first || fewer ? x[0] : x[0].view({2, 4});
        const int count = first || !fewer ? 3 : 2;
        for (int i = 0; i < count; ++i) {
          y = y.sin();
        }
        return {y.sum()};
      },
      {in.activation({8})})[0];
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("it must compute the same each time"));
  forget_failed_backward();
}

TEST_CASE_METHOD(NoLeak, "a second run ends where nothing more is needed, if it may") {
  const EarlyStop early_stop = GENERATE(EarlyStop::kNo, EarlyStop::kYes);
  expect_parity([&](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({16, 16});
    int ends = 0;
    const CheckpointedFunction function = [&ends, weight](const Tensors& x) -> Tensors {
      const at::Tensor y = at::matmul(x[0].sin(), weight);  // saves before it computes
      ++ends;
      return {y + 1};
    };
    const at::Tensor loss = in.loss(region(run, function, {in.activation({4, 16})}, early_stop));
    loss.backward();
    CHECK(ends == (run.offloader() == nullptr || early_stop == EarlyStop::kYes ? 1 : 2));
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "a function may catch what ends its second run, and go on") {
  const bool again = GENERATE(false, true);
  int caught = 0;
  expect_parity([&](const Run& run) {
    Inputs in;
    const at::Tensor weight = in.leaf({16, 16});
    const CheckpointedFunction function = [&caught, again, weight](const Tensors& x) -> Tensors {
      const at::Tensor y = x[0].sin();
      try {
        return {at::matmul(y, weight)};
      } catch (const std::exception&) {
        FAIL("a program takes the end of a second run for an error");
      } catch (...) {
        ++caught;
      }
      return {again ? at::matmul(y, weight).sin() : y};
    };
    const at::Tensor loss = in.loss(region(run, function, {in.activation({4, 16})}, EarlyStop::kYes));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return in.gradients();
  });
  CHECK(caught > 0);
}

TEST_CASE_METHOD(NoLeak, "a second run does not end before its last operation has filled what it saved") {
  expect_parity([&](const Run& run) {
    at::manual_seed(5);
    Inputs in;
    const at::Tensor weight = in.leaf({16, 16});
    const CheckpointedFunction function = [weight](const Tensors& x) -> Tensors {
      return {at::rrelu(at::matmul(x[0], weight), 0.1, 0.9, /*training=*/true)};  // saves its noise, and then draws it
    };
    in.loss(region(run, function, {in.activation({4, 16})}, EarlyStop::kYes)).backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "the random state is put back after a second run that ended early") {
  const CheckpointedFunction function = [](const Tensors& x) -> Tensors {
    const at::Generator generator = at::detail::getDefaultCPUGenerator();
    const at::Tensor state = generator.get_state();
    at::manual_seed(5);
    const at::Tensor y = at::dropout(x[0], 0.5, /*train=*/true);
    at::Generator(generator).set_state(state);
    return {y};
  };
  Inputs in;
  const at::Tensor loss = checkpoint(function, {in.activation({4, 16})}, EarlyStop::kYes)[0].sum();
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  loss.backward();
  CHECK(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
}

TEST_CASE_METHOD(NoLeak, "what a function throws while its second run ends early arrives") {
  Inputs in;
  int runs = 0;
  const at::Tensor loss = checkpoint(
      [&runs](const Tensors& x) -> Tensors {
        try {
          ++runs;
          return {x[0].sin().sum()};
        } catch (...) {
          throw std::domain_error("odd");
        }
      },
      {in.activation({8})}, EarlyStop::kYes)[0];
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("odd"));
  forget_failed_backward();
  CHECK(runs == 2);
}

TEST_CASE_METHOD(NoLeak, "a second run ends in a region that lies in the region") {
  int inner_runs = 0;
  int ends = 0;
  expect_parity([&](const Run& run) {
    Inputs in;
    const CheckpointedFunction block = gated(in);
    const CheckpointedFunction inner = [&](const Tensors& x) -> Tensors {
      ++inner_runs;
      return block(x);
    };
    const CheckpointedFunction outer = [&](const Tensors& x) -> Tensors {
      const at::Tensor y = region(run, inner, {x[0].sin()}, EarlyStop::kYes);
      ++ends;
      return {y + 1};
    };
    const at::Tensor loss = in.loss(region(run, outer, {in.activation({4, 16})}, EarlyStop::kYes));
    inner_runs = ends = 0;
    loss.backward();
    CHECK(inner_runs == (run.offloader() == nullptr ? 0 : 1));  // the outer region needs the inner one's input only
    CHECK(ends == 0);
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "what a function throws in backward arrives there, and a later backward works") {
  Inputs in;
  int runs = 0;
  const at::Tensor loss = checkpoint(
      [&runs](const Tensors& x) -> Tensors {
        if (runs++ == 1) {
          throw std::domain_error("odd");
        }
        return {x[0].sin().sum()};
      },
      {in.activation({8})})[0];
  CHECK_THROWS_WITH(loss.backward({}, /*retain_graph=*/true), Catch::Contains("odd"));
  forget_failed_backward();
  loss.backward();
  CHECK(in.gradients()[0].defined());
}

TEST_CASE_METHOD(NoLeak, "a recipe does not run a region in the forward pass") {
  Setting setting = late_without_stash();
  setting.options.policy = recompute(Recompute::kComputeBound);
  Rig rig(setting);
  int runs = 0;
  const Forward forward = [&](Inputs& in) {
    const at::Tensor y = checkpoint(
        [&runs](const Tensors& x) -> Tensors {
          ++runs;
          return {at::silu(x[0])};
        },
        {in.activation({8})})[0];
    at::Tensor result = y.pow(2);
    CHECK(runs == 1);
    return result;
  };
  const Stats stats = counted(rig, forward);
  CHECK(stats.dropped.tensors == 0);
  CHECK(runs == 2);
}

TEST_CASE_METHOD(NoLeak, "a function that goes backward itself is one clear error") {
  Inputs in;
  const at::Tensor x = in.activation({8});
  const CheckpointedFunction function = [](const Tensors& y) -> Tensors {
    const at::Tensor z = y[0].sin();
    return {torch::autograd::grad({z.sum()}, {y[0]})[0] * z};
  };
  CHECK_THROWS_WITH(checkpoint(function, {x}), Catch::Contains("went backward over what it had computed itself"));
  forget_failed_backward();
}

TEST_CASE_METHOD(NoLeak, "a result that the function puts away keeps nothing of the region") {
  constexpr std::uint64_t kBytes = 64 * 64 * sizeof(float);
  Inputs in;
  const at::Tensor x = in.leaf({64, 64});
  at::Tensor aside;
  const std::uint64_t before = device_bytes();
  checkpoint(
      [&aside](const Tensors& inputs) -> Tensors {
        const at::Tensor y = inputs[0].sin().cos().sin();
        aside = y.mean();
        return {y.sum()};
      },
      {x})[0]
      .backward();
  CHECK(device_bytes() - before < 2 * kBytes);  // the gradient
}

TEST_CASE_METHOD(NoLeak, "without gradients a region is only a call") {
  const at::NoGradGuard no_grad;
  const at::Tensor y = checkpoint([](const Tensors& x) -> Tensors { return {x[0].sin()}; }, {at::ones({3})})[0];
  CHECK(y.equal(at::ones({3}).sin()));
}

}  // namespace
}  // namespace ebb
