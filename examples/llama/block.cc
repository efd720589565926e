#include "examples/llama/block.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

namespace ebb {
namespace {

constexpr double kNormEpsilon = 1e-5;

at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) {
  return at::rms_norm(x, weight.sizes(), weight, kNormEpsilon);
}

// Rotary positions in the half-split form: the first half of each head's values pairs with the second.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

// The fused kernels share kv heads among query heads by themselves only for half types on CUDA.
bool attention_groups_heads(const at::Tensor& q) {
  return q.is_cuda() && (q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16);
}

}  // namespace

LlamaBlock::LlamaBlock(const LlamaConfig& config, const at::TensorOptions& options)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.dim / config.heads) {
  const auto weight = [&](const char* name, at::IntArrayRef sizes) {
    return register_parameter(name, at::empty(sizes, options));
  };
  const std::int64_t dim = config.dim;
  const std::int64_t kv_dim = kv_heads_ * head_dim_;
  attention_norm_ = weight("attention_norm", {dim});
  wq_ = weight("wq", {dim, dim});
  wk_ = weight("wk", {kv_dim, dim});
  wv_ = weight("wv", {kv_dim, dim});
  wo_ = weight("wo", {dim, dim});
  ffn_norm_ = weight("ffn_norm", {dim});
  w1_ = weight("w1", {config.ffn, dim});
  w3_ = weight("w3", {config.ffn, dim});
  w2_ = weight("w2", {dim, config.ffn});
}

at::Tensor LlamaBlock::forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto h = x + attention(norm(x, attention_norm_), cos, sin);
  return h + swiglu(norm(h, ffn_norm_));
}

at::Tensor LlamaBlock::attention(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t batch = x.size(0);
  const std::int64_t seq = x.size(1);
  const auto q = rope(at::linear(x, wq_).view({batch, seq, heads_, head_dim_}), cos, sin).transpose(1, 2);
  auto k = rope(at::linear(x, wk_).view({batch, seq, kv_heads_, head_dim_}), cos, sin).transpose(1, 2);
  auto v = at::linear(x, wv_).view({batch, seq, kv_heads_, head_dim_}).transpose(1, 2);
  const bool grouped = attention_groups_heads(q);
  if (!grouped && heads_ != kv_heads_) {
    k = k.repeat_interleave(heads_ / kv_heads_, 1);
    v = v.repeat_interleave(heads_ / kv_heads_, 1);
  }
  const auto mixed = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                                      /*scale=*/{}, /*enable_gqa=*/grouped);
  return at::linear(mixed.transpose(1, 2).reshape({batch, seq, heads_ * head_dim_}), wo_);
}

at::Tensor LlamaBlock::swiglu(const at::Tensor& x) {
  return at::linear(at::silu(at::linear(x, w1_)) * at::linear(x, w3_), w2_);
}

}  // namespace ebb
