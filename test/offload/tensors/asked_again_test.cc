// A backward may ask for the same save more than once, as a custom function does that calls get_saved_variables twice.

#include <atomic>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "offload/checkpoint.h"
#include "policy/policies.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The product of its inputs; its backward asks three times.
struct AsksAgain : Function<AsksAgain> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({x, y});
    return x * y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list first = context->get_saved_variables();
    const variable_list second = context->get_saved_variables();
    const variable_list third = context->get_saved_variables();
    TORCH_CHECK(first[0].data_ptr() == second[0].data_ptr() && second[0].data_ptr() == third[0].data_ptr());
    return {gradients[0] * second[1], gradients[0] * third[0]};
  }
};

TEST_CASE_METHOD(NoLeak, "a save that is asked for again while it is held is copied once") {
  const Program program = [](const Run& run) {
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = AsksAgain::apply(in.activation({64}), in.activation({64})).sin().sum();
    }
    loss.backward();
    return in.gradients();
  };
  expect_parity(program);
  Rig rig(late_without_stash());
  check_same(plain(program), outcome(program, Run(&rig.offloader())));
  CHECK(rig.stats().offloaded.tensors == 3);
  CHECK(rig.stats().fetched.tensors == 3);
}

TEST_CASE_METHOD(NoLeak, "and is no second pass over the graph: what comes next is prefetched as before") {
  Setting setting = late_without_stash();
  Rig rig(setting);
  for (int step = 0; step < 3; ++step) {
    Inputs in;
    at::Tensor loss;
    {
      const OffloadGuard guard(rig.offloader());
      at::Tensor y = in.activation({64});
      for (int layer = 0; layer < 6; ++layer) {
        y = AsksAgain::apply(y, in.activation({64}));
      }
      loss = y.sum();
    }
    rig.offloader().reset_stats();
    loss.backward();
    CHECK(rig.stats().fetched.tensors == 12);
  }
}

TEST_CASE_METHOD(NoLeak, "a checkpointed region is run once for a backward that asks again") {
  Rig rig(late_without_stash());
  Inputs in;
  std::atomic<int> runs = 0;
  const CheckpointedFunction function = [&runs](const std::vector<at::Tensor>& of) {
    ++runs;
    return std::vector<at::Tensor>{AsksAgain::apply(of[0].sin(), of[0].cos())};
  };
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    loss = checkpoint(function, {in.activation({64})})[0].sum();
  }
  loss.backward();
  CHECK(runs == 2);
  Inputs same;
  const at::Tensor x = same.activation({64});
  (x.sin() * x.cos()).sum().backward();
  CHECK(same.gradients()[0].equal(in.gradients()[0]));
}

TEST_CASE_METHOD(NoLeak, "a recipe is run once for a backward that asks again") {
  Setting setting = late();
  setting.options.policy = recompute();
  Rig rig(setting);
  const auto forward = [](Inputs& in) {
    const at::Tensor x = at::silu(in.activation({64}));
    return AsksAgain::apply(x, in.activation({64}));
  };
  static_cast<void>(counted(rig, forward));  // proves the recipe
  const Stats stats = counted(rig, forward);
  CHECK(stats.dropped.tensors == 1);
  CHECK(stats.recomputed.tensors == 1);
}

// The product of its inputs; its backward asks once for each, and lets go of the rest.
struct AsksForEach : Function<AsksForEach> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({x, y});
    return x * y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor y = context->get_saved_variables()[1];
    return {gradients[0] * y, gradients[0] * x};
  }
};

TEST_CASE_METHOD(NoLeak, "a save that a backward has let go of is still there when the same node asks again") {
  const bool retained = GENERATE(false, true);
  Rig rig(late_without_stash());
  Inputs in;
  std::atomic<int> runs = 0;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    const at::Tensor x = AsksForEach::apply(in.activation({64}), in.activation({64}));
    const CheckpointedFunction function = [&runs](const std::vector<at::Tensor>& of) {
      ++runs;
      return std::vector<at::Tensor>{AsksForEach::apply(of[0].sin(), of[0].cos())};
    };
    loss = checkpoint(function, {x})[0].sum();
  }
  rig.offloader().reset_stats();
  loss.backward({}, retained);
  CHECK(runs == 2);
  CHECK(rig.stats().fetched.tensors == 3);
}

// Asks, lets go, makes and drops a graph of its own, and asks again.
struct AsksAroundAGraph : Function<AsksAroundAGraph> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    for (int i = 0; i < 10; ++i) {
      static_cast<void>(context->get_saved_variables());
      const at::AutoGradMode recorded(true);
      const at::Tensor other = at::ones({8}).requires_grad_();
      static_cast<void>(other.sin());
    }
    return {gradients[0] * 2};
  }
};

TEST_CASE_METHOD(NoLeak, "nor is it made again where the node drops a graph in between") {
  Rig rig(late_without_stash());
  Inputs in;
  const OffloadGuard guard(rig.offloader());
  const at::Tensor loss = AsksAroundAGraph::apply(in.activation({64})).sum();
  rig.offloader().drain();
  rig.offloader().reset_stats();
  loss.backward();
  CHECK(rig.stats().fetched.tensors <= 2);  // the node's, and what the activation's own node has saved
}

}  // namespace
}  // namespace ebb
