// Integers and truth values: made, and used as indices and masks. Index values are 0 and 1, so that one index tensor
// serves, and is saved by, many operations.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

// `tensor` if it is one of truth values, else where it is positive.
at::Tensor mask(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kBool) return tensor;
  return (tensor.is_complex() ? at::real(tensor) : tensor) > 0;
}

// `tensor` if it is one of integers, flat, else zeros and ones.
at::Tensor indices(const at::Tensor& tensor, const Numbers& n) {
  if (tensor.scalar_type() == at::kLong && tensor.numel() > 0) return tensor.flatten();
  return at::arange(1 + n[1] % 5, tensor.options().dtype(at::kLong)).remainder(2);
}

at::Tensor gather(const Tensors& x, const Numbers& n) {
  const std::int64_t along = dimension(x[0], n[0]);
  const at::Tensor index = indices(x[1], n);
  return x[0].gather(along, index.select(0, 0).expand_as(x[0]));
}

at::Tensor index_select(const Tensors& x, const Numbers& n) {
  return x[0].index_select(dimension(x[0], n[0]), indices(x[1], n));
}

at::Tensor index_add(const Tensors& x, const Numbers& n) {
  const std::int64_t along = dimension(x[0], n[0]);
  const at::Tensor index = indices(x[1], n).narrow(0, 0, 1);
  return x[0].index_add(along, index, x[0].narrow(along, 0, 1));
}

at::Tensor index_put(const Tensors& x, const Numbers& n) {
  const at::Tensor index = indices(x[1], n);
  return x[0].index_put({index}, x[0].flatten().select(0, 0));
}

// A matrix whose rows `indices` may name. A GPU checks neither: what lies outside is read, or ends the process.
at::Tensor embedding(const Tensors& x, const Numbers& n) {
  const at::Tensor matrix = as_matrix(x[0]);
  if (matrix.numel() == 0) return matrix.sin();
  const at::Tensor index = indices(x[1], n);
  return at::embedding(matrix, matrix.size(0) > 1 ? index : index * 0);
}

}  // namespace

Operations index_operations() {
  constexpr Kind kind = Kind::kIndex;
  return {
      {"positive", kind, 1,
       [](const Tensors& x, const Numbers&) { return (x[0].is_complex() ? at::real(x[0]) : x[0]).detach() > 0; }},
      {"zeros_and_ones", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         return at::arange(2 + n[0] % 4, x[0].options().dtype(at::kLong)).remainder(2);
       }},
      {"where", kind, 3,
       [](const Tensors& x, const Numbers&) { return at::where(fit(mask(x[2]), x[0]), x[0], fit(x[1], x[0])); }},
      {"masked_fill", kind, 2,
       [](const Tensors& x, const Numbers&) { return x[0].masked_fill(fit(mask(x[1]), x[0]), 0.25); }},
      {"masked_select", kind, 2,
       [](const Tensors& x, const Numbers&) { return x[0].masked_select(fit(mask(x[1]), x[0])); }},
      {"multiply_by_mask", kind, 2, [](const Tensors& x, const Numbers&) { return x[0] * fit(mask(x[1]), x[0]); }},
      {"gather", kind, 2, gather},
      {"index_select", kind, 2, index_select},
      {"index", kind, 2, [](const Tensors& x, const Numbers& n) { return x[0].index({indices(x[1], n)}); }},
      {"index_add", kind, 2, index_add},
      {"index_put", kind, 2, index_put},
      {"embedding", kind, 2, embedding},
      {"take", kind, 2, [](const Tensors& x, const Numbers& n) { return x[0].take(indices(x[1], n)); }},
  };
}

}  // namespace ebb::graphs
