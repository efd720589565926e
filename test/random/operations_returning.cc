// torch::autograd::Functions whose backward returns what they have saved, as a straight-through estimator does.
//
// Note [Gradients that were saved]
// AccumulateGrad takes over a gradient that nobody else holds. What it has taken over is the program's to write to, so
// that memory which is still something else's would change with it. The programs write to gradients and look at all
// that is alive (Kind::kGradient).

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Its second input is the gradient of the first; of both if the two are the same.
struct ReturnsInput : torch::autograd::Function<ReturnsInput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({y});
    return x * 0.5;
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    return {context->get_saved_variables()[0], at::Tensor()};
  }
};

struct ReturnsToBoth : torch::autograd::Function<ReturnsToBoth> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({y});
    return x * 0.5 + y;
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    const at::Tensor saved = context->get_saved_variables()[0];
    return {saved, saved};
  }
};

// A view of what it has saved.
struct ReturnsView : torch::autograd::Function<ReturnsView> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& y) {
    context->save_for_backward({y});
    return x * 0.5;
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    return {context->get_saved_variables()[0].unsqueeze(0).squeeze(0), at::Tensor()};
  }
};

// What forward has made without gradients; the result is another tensor of the same memory.
struct ReturnsMade : torch::autograd::Function<ReturnsMade> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor made = x * 0.5;
    context->save_for_backward({made});
    return made.detach();
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    return {context->get_saved_variables()[0]};
  }
};

struct ReturnsOutput : torch::autograd::Function<ReturnsOutput> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    at::Tensor out = x * 0.5;
    context->save_for_backward({out});
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list /*gradients*/) {
    return {context->get_saved_variables()[0]};
  }
};

// `tensors[1]` if it can be a gradient of `tensors[0]`, else that.
const at::Tensor& gradient_for(const Tensors& tensors) {
  const bool fits = tensors[1].sizes() == tensors[0].sizes() && tensors[1].scalar_type() == tensors[0].scalar_type();
  return tensors[fits ? 1 : 0];
}

}  // namespace

Operations returning_operations() {
  constexpr Kind kind = Kind::kReturn;
  return {
      {"returns_input", kind, 2,
       [](const Tensors& x, const Numbers&) { return ReturnsInput::apply(x[0], gradient_for(x)); }},
      {"returns_itself", kind, 1, [](const Tensors& x, const Numbers&) { return ReturnsInput::apply(x[0], x[0]); }},
      {"returns_to_both", kind, 2,
       [](const Tensors& x, const Numbers&) { return ReturnsToBoth::apply(x[0], gradient_for(x)); }},
      {"returns_view", kind, 2,
       [](const Tensors& x, const Numbers&) { return ReturnsView::apply(x[0], gradient_for(x)); }},
      {"returns_made", kind, 1, [](const Tensors& x, const Numbers&) { return ReturnsMade::apply(x[0]); }},
      {"returns_output", kind, 1, [](const Tensors& x, const Numbers&) { return ReturnsOutput::apply(x[0]); }},
      // Saved by two nodes, and the gradient of one leaf twice.
      {"returns_twice", kind, 2,
       [](const Tensors& x, const Numbers&) {
         const at::Tensor& saved = gradient_for(x);
         return ReturnsInput::apply(x[0], saved) + ReturnsToBoth::apply(x[0], saved);
       }},
  };
}

}  // namespace ebb::graphs
