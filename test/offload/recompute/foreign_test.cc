// Looking for recipes where the program has hooks of its own: none of them is called, but by backward.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/custom_function.h>

#include "policy/policies.h"
#include "test/offload/parity.h"
#include "test/random/foreign_hooks.h"

namespace ebb {
namespace {

using graphs::Calls;
using graphs::RegionFunction;

Setting dropping() {
  Setting setting = late_without_stash();
  setting.options.policy = recompute(Recompute::kComputeBound);
  return setting;
}

at::Tensor counts(const Calls& calls) {
  return at::tensor({static_cast<std::int64_t>(calls.packs), static_cast<std::int64_t>(calls.unpacks),
                     static_cast<std::int64_t>(calls.runs)});
}

// A forward pass under the guard and a backward pass after it. Returns the gradients, and how often hooks and functions
// were called by the end of each pass.
Program with_calls(const std::function<at::Tensor(Inputs&, const std::shared_ptr<Calls>&)>& forward) {
  return [forward](const Run& run) {
    const auto calls = std::make_shared<Calls>();
    Inputs in;
    at::Tensor loss;
    {
      const auto guard = run.guard();
      loss = in.loss(forward(in, calls));
    }
    const at::Tensor after_forward = counts(*calls);
    loss.backward();
    Tensors found = in.gradients();
    found.push_back(after_forward);
    found.push_back(counts(*calls));
    return found;
  };
}

// Operations for whose results there are recipes.
std::vector<RegionFunction> ends() {
  return {[](const graphs::Tensors& x) { return at::silu(x[0]); },
          [](const graphs::Tensors& x) { return at::silu(x[0] + 1); },
          [](const graphs::Tensors& x) { return at::gelu(x[0] * x[1]); },
          [](const graphs::Tensors& x) { return x[0] * x[1]; },
          [](const graphs::Tensors& x) { return x[0] / (x[1] * x[1] + 3); },
          [](const graphs::Tensors& x) { return x[0].mm(x[1].t()); }};
}

// A square saves one tensor twice, and so looks for its recipe twice.
at::Tensor squares(at::Tensor made) {
  made = made * made;
  return made.sin() * made;
}

TEST_CASE("looking for a recipe calls no hook of the program's", "[recompute][foreign]") {
  constexpr std::uint32_t kHooksThatDoNotRaise[] = {0, 1, 3};
  for (const std::uint32_t kind : kHooksThatDoNotRaise) {
    for (const RegionFunction& end : ends()) {
      expect_parity(with_calls([&](Inputs& in, const std::shared_ptr<Calls>& calls) {
                      const at::Tensor x = in.activation({8, 8});
                      const at::Tensor y = in.activation({8, 8});
                      at::Tensor made;
                      {
                        const auto hooks = graphs::foreign_hooks(kind, calls);
                        const graphs::ForeignScope scope(hooks.get());
                        made = end({x, y});
                      }
                      return squares(made);
                    }),
                    dropping());
    }
  }
}

TEST_CASE("a hook of the program's that raises does so in backward alone", "[recompute][foreign]") {
  constexpr std::uint32_t kRaises = 2;
  const Program program = with_calls([](Inputs& in, const std::shared_ptr<Calls>& calls) {
    const at::Tensor x = in.activation({8, 8});
    const auto hooks = graphs::foreign_hooks(kRaises, calls);
    at::Tensor made;
    {
      const graphs::ForeignScope scope(hooks.get());
      made = at::silu(x);
    }
    return squares(made);
  });
  const Outcome expected = plain(program);
  CHECK(expected.error.find("a hook of the program's raises") != std::string::npos);
  Rig rig(dropping());
  check_same(expected, outcome(program, Run(&rig.offloader())));
  forget_failed_backward();
}

TEST_CASE("a region of another's checkpoint runs once in forward and once in backward", "[recompute][foreign]") {
  for (const auto by : {&graphs::checkpoint_by_hooks, &graphs::checkpoint_by_reentry}) {
    for (const RegionFunction& end : ends()) {
      expect_parity(with_calls([&](Inputs& in, const std::shared_ptr<Calls>& calls) {
                      const at::Tensor x = in.activation({8, 8});
                      const at::Tensor y = in.activation({8, 8});
                      const at::Tensor first = by(end, {x.sin(), y.cos()}, calls);
                      return squares(by(end, {first, y}, calls));
                    }),
                    dropping());
    }
  }
}

TEST_CASE("a region of another's checkpoint may have another inside", "[recompute][foreign]") {
  for (const RegionFunction& end : ends()) {
    expect_parity(with_calls([&](Inputs& in, const std::shared_ptr<Calls>& calls) {
                    const at::Tensor x = in.activation({8, 8});
                    const at::Tensor y = in.activation({8, 8});
                    const RegionFunction outer = [&end, calls](const graphs::Tensors& z) {
                      const at::Tensor inner = graphs::checkpoint_by_hooks(end, {z[0].sin(), z[1]}, calls);
                      return at::silu(inner * inner);
                    };
                    return squares(graphs::checkpoint_by_hooks(outer, {x, y}, calls));
                  }),
                  dropping());
  }
}

// As tensor-parallel layers do: writes to its input by what LibTorch does not count, and returns the input.
struct Reduces : torch::autograd::Function<Reduces> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    x.variable_data().mul_(3);
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

TEST_CASE("what a custom function returns of its input is not computed again", "[recompute][foreign]") {
  const bool has_view = GENERATE(false, true);
  expect_parity(with_calls([=](Inputs& in, const std::shared_ptr<Calls>&) {
                  const at::Tensor x = in.activation({8, 8});
                  at::Tensor reduced = Reduces::apply(x.mm(in.leaf({8, 8})));
                  reduced = has_view ? reduced.t() : reduced;
                  return reduced.sin() * reduced;
                }),
                dropping());
}

}  // namespace
}  // namespace ebb
