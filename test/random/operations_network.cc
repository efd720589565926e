// Layers of networks, over whatever sizes their operands have.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>

#include "test/random/operation.h"

namespace ebb::graphs {
namespace {

// A vector of `length` values of `from`, which is repeated as needed: a weight or a bias.
at::Tensor vector_of(const at::Tensor& from, std::int64_t length, at::ScalarType type) {
  const at::Tensor flat = from.flatten().to(type);
  return flat.size(0) >= length ? flat.narrow(0, 0, length) : flat.select(0, 0).expand({length});
}

// `x` with so many dimensions: leading ones are added, or become one. Not of nothing, which is a division by zero in
// some of LibTorch's kernels.
at::Tensor with_dimensions(const at::Tensor& x, std::int64_t dimensions) {
  TORCH_CHECK(x.numel() > 0, "no elements");
  at::Tensor shaped = x;
  while (shaped.dim() < dimensions) {
    shaped = shaped.unsqueeze(0);
  }
  return shaped.flatten(0, shaped.dim() - dimensions);
}

at::Tensor layer_norm(const Tensors& x, const Numbers& /*n*/) {
  const std::int64_t width = x[0].size(-1);
  return at::layer_norm(x[0], {width}, vector_of(x[1], width, x[0].scalar_type()),
                        vector_of(x[1], width, x[0].scalar_type()));
}

at::Tensor group_norm(const Tensors& x, const Numbers& n) {
  const at::Tensor shaped = with_dimensions(x[0], 3);
  const std::int64_t channels = shaped.size(1);
  const std::int64_t groups = channels % 2 == 0 && n[0] % 2 == 0 ? 2 : 1;
  return at::group_norm(shaped, groups, vector_of(x[1], channels, x[0].scalar_type()));
}

at::Tensor batch_norm(const Tensors& x, const Numbers& /*n*/) {
  const at::Tensor shaped = with_dimensions(x[0], 3);
  const std::int64_t channels = shaped.size(1);
  // As torch's own modules ask: the gradient of one value less itself is rounding, another one from run to run.
  TORCH_CHECK(shaped.numel() > channels, "one value per channel");
  const at::Tensor mean = at::zeros({channels}, x[0].options());
  const at::Tensor variance = at::ones({channels}, x[0].options());
  return at::batch_norm(shaped, vector_of(x[1], channels, x[0].scalar_type()), {}, mean, variance, /*training=*/true,
                        0.1, 0.1, /*cudnn_enabled=*/false);
}

at::Tensor conv1d(const Tensors& x, const Numbers& n) {
  const at::Tensor shaped = with_dimensions(x[0], 3);
  const at::Tensor weight = vector_of(x[1], 2 * shaped.size(1) * 3, x[0].scalar_type()).view({2, shaped.size(1), 3});
  return at::conv1d(shaped, weight, {}, /*stride=*/1 + n[0] % 2, /*padding=*/1) / (3 * shaped.size(1));
}

at::Tensor conv2d(const Tensors& x, const Numbers& n) {
  at::Tensor shaped = with_dimensions(x[0], 4);
  if (n[1] % 2 == 0) {
    shaped = shaped.contiguous(at::MemoryFormat::ChannelsLast);
  }
  const std::int64_t channels = shaped.size(1);
  const at::Tensor weight = vector_of(x[1], 2 * channels * 9, x[0].scalar_type()).view({2, channels, 3, 3});
  return at::conv2d(shaped, weight, vector_of(x[1], 2, x[0].scalar_type()), /*stride=*/1 + n[0] % 2, /*padding=*/1) /
         (9 * channels);
}

at::Tensor avg_pool(const Tensors& x, const Numbers& /*n*/) {
  return at::avg_pool2d(with_dimensions(x[0], 4), {2, 2}, {1, 1}, {1, 1});
}

at::Tensor max_pool(const Tensors& x, const Numbers& /*n*/) {
  return at::max_pool2d(with_dimensions(x[0], 4), {2, 2}, {1, 1}, {1, 1});
}

// Times 1, since LibTorch's memory-efficient kernel takes any gradient to lie at a multiple of 16 bytes (2.11.0 and an
// H100: "misaligned address" for a slice of one).
at::Tensor attention(const Tensors& x, const Numbers& n) {
  const at::Tensor query = with_dimensions(x[0], 4);
  const at::Tensor key = fit(x[1].to(x[0].scalar_type()), query).expand_as(query);
  return at::scaled_dot_product_attention(query, key, query, {}, 0.0, /*is_causal=*/n[0] % 2 == 0) * 1;
}

at::Tensor glu(const Tensors& x, const Numbers& n) { return at::glu(x[0], dimension(x[0], n[0])); }

}  // namespace

Operations network_operations() {
  constexpr Kind kind = Kind::kCompute;
  return {
      {"layer_norm", kind, 2, layer_norm}, {"group_norm", kind, 2, group_norm}, {"batch_norm", kind, 2, batch_norm},
      {"conv1d", kind, 2, conv1d},         {"conv2d", kind, 2, conv2d},         {"avg_pool", kind, 1, avg_pool},
      {"max_pool", kind, 1, max_pool},     {"attention", kind, 2, attention},   {"glu", kind, 1, glu},
  };
}

}  // namespace ebb::graphs
