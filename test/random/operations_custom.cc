// torch::autograd::Functions that a user might write.

#include <chrono>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/random/operation.h"
#include "test/random/slow_cpu.h"

namespace ebb::graphs {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves its input, its output and nothing at all, and looks at them twice.
struct Cubed : torch::autograd::Function<Cubed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    at::Tensor out = x * x * x * 0.5;
    context->save_for_backward({x, out, at::Tensor()});
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto again = context->get_saved_variables();
    TORCH_CHECK(!saved[2].defined() && saved[0].equal(again[0]), "the same save gave two answers");
    return {gradients[0] * saved[0] * again[0] * 1.5 + saved[1] * 0.125};
  }
};

// A view of a leaf that is made without gradients, as a function's forward makes it, has no node and still says that it
// requires a gradient. Whatever the hooks, LibTorch then unpacks a new leaf, which collects a gradient of its own; with
// create_graph that is a cycle (docs/correctness.md).
at::Tensor not_a_leaf(const at::Tensor& tensor) { return tensor.is_leaf() ? tensor.detach() : tensor; }

// Saves one tensor twice and a view of another.
struct Blend : torch::autograd::Function<Blend> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({x, not_a_leaf(y.flatten()), x});
    return x * y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1].view_as(saved[0]), gradients[0] * saved[2]};
  }
};

// Asks for its saves three times and holds the answers: what is at hand is not made once more.
struct GetsThrice : torch::autograd::Function<GetsThrice> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({x, y});
    return x * y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto first = context->get_saved_variables();
    const auto second = context->get_saved_variables();
    const auto third = context->get_saved_variables();
    for (std::size_t i = 0; i < first.size(); ++i) {
      TORCH_CHECK(share_a_storage(first[i], second[i]) && share_a_storage(first[i], third[i]),
                  "a save was made once more while it was held");
    }
    return {gradients[0] * second[1], gradients[0] * third[0]};
  }
};

// Asks for all of its saves to take one of them, and again for the next.
struct GetsOneByOne : torch::autograd::Function<GetsOneByOne> {
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

at::Tensor block(const at::Tensor& x) { return (x.sin() * x.sigmoid()).tanh(); }

// Computes its block again in backward: autograd inside of autograd.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return block(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor out = block(x);
    return torch::autograd::grad({out}, {x}, {gradients[0]});
  }
};

at::Tensor through_the_cpu(const at::Tensor& x) {
  const at::Tensor out = x.cpu().sigmoid();
  if (SlowCpu::active && out.requires_grad()) {
    out.register_hook([](const at::Tensor&) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  }
  return out.to(x.device());
}

}  // namespace

Operations custom_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"cubed", kind, 1, [](const Tensors& x, const Numbers&) { return Cubed::apply(x[0]); }},
      {"blend", kind, 2,
       [](const Tensors& x, const Numbers&) { return Blend::apply(x[0], fit(x[1], x[0]).expand_as(x[0])); }},
      {"gets_thrice", kind, 2,
       [](const Tensors& x, const Numbers&) { return GetsThrice::apply(x[0], fit(x[1], x[0]).expand_as(x[0])); }},
      {"gets_one_by_one", kind, 2,
       [](const Tensors& x, const Numbers&) { return GetsOneByOne::apply(x[0], fit(x[1], x[0]).expand_as(x[0])); }},
      {"recomputed", kind, 1, [](const Tensors& x, const Numbers&) { return Recomputed::apply(x[0]); }},
      {"through_the_cpu", kind, 1, [](const Tensors& x, const Numbers&) { return through_the_cpu(x[0]); }},
  };
}

}  // namespace ebb::graphs
