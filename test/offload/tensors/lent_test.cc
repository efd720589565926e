// A backward that returns a saved tensor as its gradient: the leaf's `.grad` must not be memory that the program, or
// another save, still uses. So programs here write to their gradients, and all of their live tensors are compared.

#include <atomic>
#include <cstddef>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "offload/checkpoint.h"
#include "policy/policies.h"
#include "test/offload/on_threads.h"
#include "test/offload/parity.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Passes its first input on, and returns its second one as the gradient of the first.
struct ReturnsSaved : Function<ReturnsSaved> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& saved) {
    context->save_for_backward({saved});
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    return {context->get_saved_variables()[0], at::Tensor()};
  }
};

// Saves what it computed without gradients, and returns that.
struct ReturnsComputed : Function<ReturnsComputed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::Tensor* kept) {
    const at::Tensor computed = x * 3;
    *kept = computed;
    context->save_for_backward({computed});
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    return {context->get_saved_variables()[0], at::Tensor()};
  }
};

// Saves its output and returns that: plain autograd itself takes such a tensor over.
struct ReturnsOutput : Function<ReturnsOutput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    at::Tensor out = x * 2;
    context->save_for_backward({out});
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    return {context->get_saved_variables()[0]};
  }
};

// Saves what it computed without gradients, passes on another tensor over the same memory, and returns what it saved.
struct ReturnsMemoryOfOutput : Function<ReturnsMemoryOfOutput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor made = x * 2;
    context->save_for_backward({made});
    return made.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    return {context->get_saved_variables()[0]};
  }
};

// Returns what it saved as the gradient of both of its inputs.
struct ReturnsToBoth : Function<ReturnsToBoth> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& saved) {
    context->save_for_backward({saved});
    return x + saved;
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    const at::Tensor saved = context->get_saved_variables()[0];
    return {saved, saved};
  }
};

void write(const Tensors& leaves) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& leaf : leaves) {
    leaf.mutable_grad().mul_(-5).add_(1);
  }
}

// A setting of each kind: moved by the simulated tier, by the disk; kept by the policy, below a policy's least bytes.
std::vector<Setting> kinds() {
  std::vector<Setting> settings{late(), late_without_stash(), disk()};
  settings.push_back(late());
  settings.back().name = "kept";
  settings.back().options.policy = keep_everything();
  settings.push_back(late());
  settings.back().name = "smaller than any that is asked about";
  settings.back().options.policy = keep_everything(1 << 20);
  return settings;
}

void expect_parity_of_each_kind(const Program& program) {
  for (const Setting& setting : kinds()) {
    expect_parity(program, setting);
  }
}

enum class Saved : std::uint8_t { kConstant, kActivation, kParameter, kViewOfParameter };

at::Tensor make(Inputs& in, Saved what) {
  switch (what) {
    case Saved::kConstant:
      return in.constant({8});
    case Saved::kActivation:
      return in.activation({8});
    case Saved::kParameter:
      return in.leaf({8});
    case Saved::kViewOfParameter:
      break;
  }
  return in.leaf({2, 4}).view({8});
}

TEST_CASE_METHOD(NoLeak, "a gradient that a backward returns from its saves is not the program's own tensor") {
  const Saved what = GENERATE(Saved::kConstant, Saved::kActivation, Saved::kParameter, Saved::kViewOfParameter);
  const bool retained = GENERATE(false, true);
  CAPTURE(static_cast<int>(what), retained);
  expect_parity_of_each_kind([=](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor saved = make(in, what);
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = ReturnsSaved::apply(x, saved).sum();
    }
    loss.backward({}, retained);
    write({x});
    Tensors all{x, saved, x.grad()};
    if (retained) {  // by default a second backward adds to the gradient in place
      loss.backward();
      write({x});
      all.push_back(x.grad());
      all.push_back(saved);
    }
    return all;
  });
}

TEST_CASE_METHOD(NoLeak, "nor is it memory that another save still has, though the program has let go of the tensor") {
  const bool activation = GENERATE(false, true);
  expect_parity_of_each_kind([=](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor y = in.leaf({8});
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const at::Tensor saved = activation ? in.activation({8}) : in.constant({8});
      loss = (ReturnsSaved::apply(x, saved) + ReturnsSaved::apply(y, saved) + y * saved).sum();
    }
    torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
    write({x, y});
    const Tensors once{x.grad().clone(), y.grad().clone()};
    loss.backward();
    return Tensors{once[0], once[1], x.grad(), y.grad()};
  });
}

TEST_CASE_METHOD(NoLeak, "nor is it memory of which another save has a view") {
  expect_parity_of_each_kind([](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor y = in.leaf({4, 8});
    at::Tensor returned;
    at::Tensor viewed;
    {
      const auto guard = run.guard();
      const at::Tensor saved = in.activation({8});
      returned = ReturnsSaved::apply(x, saved).sum();
      viewed = (y * saved.expand({4, 8})).sum();
    }
    returned.backward();
    write({x});
    viewed.backward();
    return in.gradients();
  });
}

TEST_CASE_METHOD(NoLeak, "two gradients that are the same saved tensor do not share memory") {
  expect_parity_of_each_kind([](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor y = in.leaf({8});
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const at::Tensor saved = in.activation({8});
      loss = (ReturnsSaved::apply(x, saved) + ReturnsSaved::apply(y, saved)).sum();
    }
    loss.backward();
    write({x});
    return Tensors{x.grad(), y.grad()};
  });
}

TEST_CASE_METHOD(NoLeak, "what a function computed without gradients and saved is handed out as plain autograd does") {
  const bool program_keeps_it = GENERATE(false, true);
  expect_parity_of_each_kind([=](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    at::Tensor kept;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = ReturnsComputed::apply(x, &kept).sum();
    }
    if (!program_keeps_it) {
      kept.reset();
    }
    loss.backward();
    write({x});
    return program_keeps_it ? Tensors{x.grad(), kept} : Tensors{x.grad()};
  });
}

TEST_CASE_METHOD(NoLeak, "an output that a backward returns is taken over, as plain autograd does") {
  expect_parity_of_each_kind([](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    at::Tensor out;
    {
      const auto guard = run.guard();
      out = ReturnsOutput::apply(x);
    }
    out.sum().backward();
    write({x});
    return Tensors{x.grad(), out.detach()};
  });
}

TEST_CASE_METHOD(NoLeak, "a saved tensor that a recipe begins from is taken over, as plain autograd does") {
  Setting setting = late();
  setting.options.policy = recompute(Recompute::kComputeBound);
  const Program program = [](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    at::Tensor out;
    at::Tensor largest;
    {
      const auto guard = run.guard();
      out = ReturnsMemoryOfOutput::apply(x);
      largest = std::get<0>(out.topk(2));  // saves indices, which are made again from `out`
    }
    out.sum().backward();
    write({x});
    return Tensors{x.grad(), out.detach(), largest.detach()};
  };
  expect_parity(program, setting);
}

TEST_CASE_METHOD(NoLeak, "an input of a checkpointed region is not taken over either") {
  expect_parity_of_each_kind([](const Run& run) {
    Inputs in;
    const at::Tensor x = in.leaf({8});
    const at::Tensor saved = in.activation({8});
    const at::Tensor constant = in.constant({8});
    const CheckpointedFunction function = [](const std::vector<at::Tensor>& of) {
      return std::vector<at::Tensor>{ReturnsSaved::apply(of[0], of[1]) + ReturnsSaved::apply(of[0], of[2])};
    };
    at::Tensor loss;
    {
      const auto guard = run.guard();
      const std::vector<at::Tensor> inputs{x, saved, constant};
      loss = (run.offloader() == nullptr ? function(inputs) : checkpoint(function, inputs))[0].sum();
    }
    loss.backward();
    write({x});
    return Tensors{x.grad(), saved, constant};
  });
}

TEST_CASE_METHOD(NoLeak, "a saved tensor that is nobody else's is still taken over, without a copy") {
  Setting setting = late_without_stash();
  Rig rig(setting);
  Inputs in;
  const at::Tensor x = in.leaf({1024});
  const void* returned = nullptr;
  at::Tensor loss;
  {
    const OffloadGuard guard(rig.offloader());
    at::Tensor kept;
    loss = ReturnsComputed::apply(x, &kept).sum();
  }
  x.register_hook([&](const at::Tensor& gradient) { returned = gradient.data_ptr(); });
  loss.backward();
  CHECK(x.grad().data_ptr() == returned);
}

TEST_CASE_METHOD(NoLeak, "nor is it while other threads end their backward passes") {
  Rig rig(late());
  std::atomic<int> wrong = 0;
  on_threads(4, [&](std::size_t thread) {
    for (int i = 0; i < 200; ++i) {
      const at::Tensor x = at::ones({8}).requires_grad_();
      const at::Tensor saved = at::full({8}, static_cast<double>(thread + 2)) * x;
      at::Tensor loss;
      {
        const OffloadGuard guard(rig.offloader());
        loss = ReturnsSaved::apply(x, saved).sum();
      }
      loss.backward();
      write({x});
      wrong += saved.detach().eq(static_cast<double>(thread + 2)).all().item<bool>() ? 0 : 1;
    }
  });
  CHECK(wrong == 0);
}

// The sum of two gradients requires a gradient if it was added in place to a saved tensor, and not if it is new memory.
TEST_CASE_METHOD(NoLeak,
                 "a gradient is added to a saved tensor in place where plain autograd does that, and only there") {
  const bool retained = GENERATE(false, true);
  const auto sum = [=](Offloader* offloader) {
    const at::Tensor x = at::ones({8}).requires_grad_();
    at::Tensor loss;
    {
      const Run run(offloader);
      const auto guard = run.guard();
      loss = ReturnsToBoth::apply(x, x.sin() * x).sum();
    }
    return torch::autograd::grad({loss}, {x}, {}, retained)[0];
  };
  const at::Tensor expected = sum(nullptr);
  CHECK(expected.requires_grad() != retained);
  for (const Setting& setting : kinds()) {
    CAPTURE(setting.name, retained);
    Rig rig(setting);
    const at::Tensor found = sum(&rig.offloader());
    CHECK(found.requires_grad() == expected.requires_grad());
    CHECK(found.equal(expected));
  }
}

// The softmax has saved its output, too. Once its node has let go of that, nobody but the first gradient has the
// memory, and LibTorch adds the second one in place: then the sum is the very tensor that was returned, and requires a
// gradient.
TEST_CASE_METHOD(NoLeak,
                 "gradients that meet are added in place where the last other save of the memory has just ended") {
  const auto sum_requires_gradient = [](const Run& run) {
    Inputs in;
    const at::Tensor leaf = in.leaf({5, 8});
    at::Tensor result;
    {
      const auto guard = run.guard();
      result = ReturnsToBoth::apply(leaf, at::softmax(leaf, 1));
    }
    return torch::autograd::grad({result.sum()}, {leaf})[0].requires_grad();
  };
  REQUIRE(sum_requires_gradient(Run(nullptr)));
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    CHECK(sum_requires_gradient(Run(&rig.offloader())));
  }
}

// Without hooks a saved leaf that requires no gradient is handed out itself, each time. The program has it as the first
// gradient, and so the second one is not taken over: it is added to in place by the third, and would change the leaf.
TEST_CASE_METHOD(NoLeak, "what is handed out itself is one tensor, however often backward asks") {
  for (const Setting& setting : kinds()) {
    CAPTURE(setting.name);
    Rig rig(setting);
    const at::Tensor leaf = at::full({8}, 2.0).requires_grad_();
    at::Tensor result;
    {
      const OffloadGuard guard(rig.offloader());
      result = ReturnsSaved::apply(leaf, leaf.detach());
    }
    const at::Tensor first = torch::autograd::grad({result.sum()}, {leaf}, {}, /*retain_graph=*/true)[0];
    const at::Tensor second = torch::autograd::grad({result.sum()}, {leaf}, {}, /*retain_graph=*/true)[0];
    CHECK(second.is_same(first));
    result.sum().backward();
    leaf.sum().backward();
    CHECK(leaf.detach().eq(2).all().item<bool>());
    CHECK(leaf.grad().eq(3).all().item<bool>());
  }
}

// A saved view holds its base, and so does the gradient that it is: nothing is added to that in place.
TEST_CASE_METHOD(NoLeak, "a gradient that is a saved view is not added to in place") {
  const auto sum_requires_gradient = [](const Run& run) {
    Inputs in;
    const at::Tensor leaf = in.leaf({5, 8});
    at::Tensor result;
    {
      const auto guard = run.guard();
      result = ReturnsToBoth::apply(leaf, (leaf * 2).view({5, 8}));
    }
    return torch::autograd::grad({result.sum()}, {leaf})[0].requires_grad();
  };
  const bool expected = sum_requires_gradient(Run(nullptr));
  for (const Setting& setting : some_settings()) {
    INFO(setting.name);
    Rig rig(setting);
    CHECK(sum_requires_gradient(Run(&rig.offloader())) == expected);
  }
}

}  // namespace
}  // namespace ebb
