#pragma once

#include <torch/nn/module.h>

#include "examples/llama/config.h"

namespace ebb {

// One pre-norm transformer block: x + attention(norm(x)), then h + swiglu(norm(h)).
class LlamaBlock : public torch::nn::Module {
 public:
  // The weights are empty: Llama fills them, in one order for the whole model.
  LlamaBlock(const LlamaConfig& config, const at::TensorOptions& options);

  // x [batch, seq, dim]; cos and sin [seq, 1, head_dim].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

 private:
  at::Tensor attention(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);
  at::Tensor swiglu(const at::Tensor& x);

  std::int64_t heads_;
  std::int64_t kv_heads_;
  std::int64_t head_dim_;
  at::Tensor attention_norm_;
  at::Tensor wq_, wk_, wv_, wo_;
  at::Tensor ffn_norm_;
  at::Tensor w1_, w3_, w2_;
};

}  // namespace ebb
