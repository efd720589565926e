// Reductions, and what runs along a dimension.

#include <tuple>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include "test/random/operation.h"

namespace ebb::graphs {

Operations reducing_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"sum_all", kind, 1, [](const Tensors& x, const Numbers&) { return x[0].sum(); }},
      {"sum", kind, 1,
       [](const Tensors& x, const Numbers& n) { return x[0].sum(dimension(x[0], n[0]), /*keepdim=*/n[1] % 2 == 0); }},
      {"mean", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].mean(dimension(x[0], n[0])); }},
      {"variance", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         return x[0].var(dimension(x[0], n[0]), /*unbiased=*/false, /*keepdim=*/n[1] % 2 == 0);
       }},
      {"norm", kind, 1, [](const Tensors& x, const Numbers&) { return (x[0].abs() + 0.1).norm(); }},
      {"logsumexp", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].logsumexp(dimension(x[0], n[0])); }},
      {"amax", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].amax(dimension(x[0], n[0])); }},
      {"max", kind, 1,
       [](const Tensors& x, const Numbers& n) { return std::get<0>(x[0].max(dimension(x[0], n[0]), n[1] % 2 == 0)); }},
      {"median", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         // Of an expanded tensor LibTorch's median gives another value from run to run, without ebb as well.
         return std::get<0>(x[0].contiguous().median(dimension(x[0], n[0])));
       }},
      {"sort", kind, 1,
       [](const Tensors& x, const Numbers& n) { return std::get<0>(x[0].sort(dimension(x[0], n[0]), n[1] % 2 == 0)); }},
      {"topk", kind, 1,
       [](const Tensors& x, const Numbers& n) { return std::get<0>(x[0].topk(1, dimension(x[0], n[0]))); }},
      {"cummax", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         // Of nothing, its backward returns the tensor that it saved, which is then added to in place.
         TORCH_CHECK(x[0].numel() > 0, "no elements");
         return std::get<0>(x[0].cummax(dimension(x[0], n[0])));
       }},
      {"cumsum", kind, 1, [](const Tensors& x, const Numbers& n) { return x[0].cumsum(dimension(x[0], n[0])) * 0.5; }},
      {"cumprod", kind, 1,
       [](const Tensors& x, const Numbers& n) { return x[0].clamp(-1, 1).cumprod(dimension(x[0], n[0])); }},
      {"normalize", kind, 1,
       [](const Tensors& x, const Numbers&) { return x[0] * (x[0].pow(2).mean(-1, true) + 1e-3).rsqrt(); }},
      {"standardize", kind, 1,
       [](const Tensors& x, const Numbers& n) {
         const std::int64_t along = dimension(x[0], n[0]);
         const at::Tensor centred = x[0] - x[0].mean(along, true);
         return centred / (centred.pow(2).mean(along, true) + 0.1).sqrt();
       }},
  };
}

}  // namespace ebb::graphs
