// What is run in a checkpointed region: its saves are made by running it again.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "test/random/operation.h"

namespace ebb::graphs {

Operations region_operations() {
  constexpr Kind kind = Kind::kRegion;
  return {
      {"region_of_a_chain", kind, 1,
       [](const Tensors& x, const Numbers&) { return (at::silu(x[0]) * x[0].sin()).tanh() * 0.5; }},
      {"region_of_two", kind, 2,
       [](const Tensors& x, const Numbers&) { return at::sigmoid(x[0]) * fit(x[1], x[0]) + x[0].exp().clamp_max(3); }},
      {"region_of_one_operation", kind, 1, [](const Tensors& x, const Numbers&) { return at::silu(x[0] + 1); }},
      {"region_of_a_quotient", kind, 2,
       [](const Tensors& x, const Numbers&) { return x[0] / (fit(x[1], x[0]).abs() + 3); }},
      {"region_of_a_product_of_two_uses", kind, 2,
       [](const Tensors& x, const Numbers&) {
         const at::Tensor product = x[0] * fit(x[1], x[0]);
         return product.sin() * product;
       }},
      {"region_of_a_function", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         return operation(n[0] % 2 == 0 ? "gets_thrice" : "gets_one_by_one").run({x[0].sin(), x[0]}, n).cos();
       }},
  };
}

}  // namespace ebb::graphs
