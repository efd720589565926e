// Products of matrices, with operands as they come: views of all layouts, both operands the same tensor. A product is
// divided by the length of its sums, or values would grow from one to the next.

#include <tuple>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

std::tuple<at::Tensor, at::Tensor> same_type(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType type = at::result_type(a, b);
  return {a.to(type), b.to(type)};
}

// b or its transpose, whichever can stand to the right of a; else a's own transpose.
at::Tensor right_factor(const at::Tensor& a, const at::Tensor& b) {
  if (b.size(-2) == a.size(-1)) return b;
  if (b.size(-1) == a.size(-1)) return b.transpose(-1, -2);
  return a.transpose(-1, -2);
}

at::Tensor batched(const at::Tensor& tensor) {
  return tensor.dim() < 3 ? as_matrix(tensor).unsqueeze(0) : tensor.flatten(0, -3);
}

at::Tensor mm(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(as_matrix(x[0]), as_matrix(x[1]));
  return at::mm(a, right_factor(a, b)) / a.size(1);
}

at::Tensor mm_transposed(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(as_matrix(x[0]).t(), as_matrix(x[1]));
  return at::mm(a, right_factor(a, b)) / a.size(1);
}

at::Tensor bmm(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(batched(x[0]), batched(x[1]));
  const at::Tensor right = right_factor(a, b);
  return at::bmm(a, right.narrow(0, 0, 1).expand({a.size(0), right.size(1), right.size(2)})) / a.size(2);
}

at::Tensor matmul(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(x[0], as_matrix(x[1]));
  return at::matmul(a, a.dim() > 1 ? right_factor(as_matrix(a), b) : a) / a.size(-1);
}

at::Tensor linear(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(x[0], as_matrix(x[1]));
  return at::linear(a, b.size(1) == a.size(-1) ? b : as_matrix(a)) / a.size(-1);
}

at::Tensor addmm(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(as_matrix(x[0]), as_matrix(x[1]));
  const at::Tensor right = right_factor(a, b);
  const at::Tensor product = a.detach().narrow(1, 0, 1).expand({a.size(0), right.size(1)});
  return at::addmm(fit(x[2].to(a.scalar_type()), product), a, right, 0.5, 0.25);
}

at::Tensor outer(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(x[0].flatten(), x[1].flatten());
  return at::outer(a, b);
}

at::Tensor dot(const Tensors& x, const Numbers& /*n*/) {
  const auto [a, b] = same_type(x[0].flatten(), fit(x[1], x[0]).expand_as(x[0]).flatten());
  return at::dot(a, b) / a.size(0);
}

}  // namespace

Operations matrix_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"mm", kind, 2, mm},         {"mm_transposed", kind, 2, mm_transposed},
      {"bmm", kind, 2, bmm},       {"matmul", kind, 2, matmul},
      {"linear", kind, 2, linear}, {"addmm", kind, 3, addmm},
      {"outer", kind, 2, outer},   {"dot", kind, 2, dot},
  };
}

}  // namespace ebb::graphs
