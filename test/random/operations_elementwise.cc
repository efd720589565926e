// One tensor in, one of the same sizes out.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "test/random/operation.h"

namespace ebb::graphs {

Operations elementwise_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      // Save their input.
      {"sin", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].sin(); }},
      {"cos", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].cos(); }},
      {"log_of_abs", kind, 1, [](const Tensors& x, const Numbers&) { return (x[0].abs() + 1).log(); }},
      {"square", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].pow(2); }},
      {"power", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].pow(2 + n[0] % 3); }},
      {"gelu", kind, 1,
       [](const Tensors& x, const Numbers& n) { return at::gelu(x[0], n[0] % 2 == 0 ? "none" : "tanh"); }},
      {"silu", kind, 1, [](const Tensors& x, const Numbers&) { return at::silu(x[0]); }},
      {"mish", kind, 1, [](const Tensors& x, const Numbers&) { return at::mish(x[0]); }},
      {"softplus", kind, 1, [](const Tensors& x, const Numbers&) { return at::softplus(x[0]); }},
      {"log_sigmoid", kind, 1, [](const Tensors& x, const Numbers&) { return at::log_sigmoid(x[0]); }},
      {"leaky_relu", kind, 1, [](const Tensors& x, const Numbers&) { return at::leaky_relu(x[0]); }},
      {"hardswish", kind, 1, [](const Tensors& x, const Numbers&) { return at::hardswish(x[0]); }},
      {"atan", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].atan(); }},
      {"erf", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].erf(); }},
      {"abs", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].abs(); }},
      {"clamp", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].clamp(-0.5, 0.5); }},
      {"twice_used", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].sin() * x[0].cos() + x[0].pow(2); }},
      // Save their output.
      {"exp", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].exp(); }},
      {"tanh", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].tanh(); }},
      {"sigmoid", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].sigmoid(); }},
      {"relu", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].relu(); }},
      {"elu", kind, 1, [](const Tensors& x, const Numbers&) { return at::elu(x[0]); }},
      {"sqrt_of_abs", kind, 1, [](const Tensors& x, const Numbers&) { return (x[0].abs() + 0.5).sqrt(); }},
      {"rsqrt_of_abs", kind, 1, [](const Tensors& x, const Numbers&) { return (x[0].abs() + 0.5).rsqrt(); }},
      {"reciprocal_of_abs", kind, 1, [](const Tensors& x, const Numbers&) { return (x[0].abs() + 0.5).reciprocal(); }},
      {"softmax", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].softmax(dimension(x[0], n[0])); }},
      {"log_softmax", kind, 1,
       [](const Tensors& x, const Numbers& n) { return x[0].log_softmax(dimension(x[0], n[0])); }},
      // Save nothing.
      {"negate", kind, 1, [](const Tensors& x, const Numbers&) { return -x[0]; }},
      {"scale", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0] * (0.25 + 0.5 * (n[0] % 3)); }},
      {"add_number", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0] + 0.1 * (n[0] % 5); }},
  };
}

}  // namespace ebb::graphs
