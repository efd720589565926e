// Two or three tensors, element by element or side by side.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "test/random/operation.h"

namespace ebb::graphs {

Operations combining_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"add", kind, 2,
       [](const Tensors& x, const Numbers& n) { return at::add(x[0], fit(x[1], x[0]), 1 + 0.5 * (n[0] % 2)); }},
      {"subtract", kind, 2, [](const Tensors& x, const Numbers&) { return x[0] - fit(x[1], x[0]); }},
      {"multiply", kind, 2, [](const Tensors& x, const Numbers&) { return x[0] * fit(x[1], x[0]); }},
      {"multiply_by_transposed", kind, 2,
       [](const Tensors& x, const Numbers&) { return as_matrix(x[0]) * fit(as_matrix(x[1]).t(), as_matrix(x[0])); }},
      {"divide", kind, 2, [](const Tensors& x, const Numbers&) { return x[0] / (fit(x[1], x[0]).abs() + 0.5); }},
      {"maximum", kind, 2, [](const Tensors& x, const Numbers&) { return at::maximum(x[0], fit(x[1], x[0])); }},
      {"atan2", kind, 2, [](const Tensors& x, const Numbers&) { return at::atan2(x[0], fit(x[1], x[0]).abs() + 0.5); }},
      {"mse_loss", kind, 2,
       [](const Tensors& x, const Numbers&) { return at::mse_loss(x[0], fit(x[1], x[0]).expand_as(x[0])); }},
      {"smooth_l1_loss", kind, 2,
       [](const Tensors& x, const Numbers&) { return at::smooth_l1_loss(x[0], fit(x[1], x[0]).expand_as(x[0])); }},
      {"gated", kind, 2, [](const Tensors& x, const Numbers&) { return at::silu(x[0]) * fit(x[1], x[0]); }},
      {"lerp", kind, 3,
       [](const Tensors& x, const Numbers&) {
         return at::lerp(x[0], fit(x[1], x[0]).expand_as(x[0]), fit(x[2], x[0]).expand_as(x[0]));
       }},
      {"addcmul", kind, 3,
       [](const Tensors& x, const Numbers&) { return at::addcmul(x[0], fit(x[1], x[0]), fit(x[2], x[0]), 0.5); }},
      {"addcdiv", kind, 3,
       [](const Tensors& x, const Numbers&) {
         return at::addcdiv(x[0], fit(x[1], x[0]), fit(x[2], x[0]).abs() + 0.5, 0.5);
       }},
      {"cat", kind, 2,
       [](const Tensors& x, const Numbers& n) {
         return at::cat({x[0], fit(x[1], x[0]).expand_as(x[0])}, dimension(x[0], n[0]));
       }},
      {"stack", kind, 2,
       [](const Tensors& x, const Numbers& n) {
         return at::stack({x[0], fit(x[1], x[0]).expand_as(x[0])}, dimension(x[0], n[0]));
       }},
      {"cat_flat", kind, 3,
       [](const Tensors& x, const Numbers&) {
         return at::cat({x[0].flatten(), x[1].flatten(), x[2].flatten()});
       }},
  };
}

}  // namespace ebb::graphs
