#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <torch/nn/module.h>

#include "examples/llama/config.h"
#include "examples/llama/model_part.h"

namespace ebb {

class LlamaBlock;

// Token embedding, pre-norm blocks (grouped-query attention with rope, then SwiGLU), a final norm and an untied head;
// no biases, no dropout. Weights start normal with deviation 0.02, equal for equal seed, device kind and dtype,
// and drawn without LibTorch's global generator.
//
// The forward comes in two parts so that a caller can put the head under a NoOpGuard: its saves are wanted at once.
class Llama : public torch::nn::Module {
 public:
  // `max_seq` bounds the sequence length (the rope tables are made for it). `options` gives device and dtype. `made`,
  // if any, is called with each parameter that has its values, before the next block is made: a model that is larger
  // than the device can have its parameters taken elsewhere.
  Llama(const LlamaConfig& config, std::int64_t max_seq, std::uint64_t seed, const at::TensorOptions& options = {},
        const std::function<void(const at::Tensor& parameter)>& made = {});

  // int64 tokens [batch, seq] -> [batch, seq, dim], normed. Throws c10::Error where seq is over max_seq.
  at::Tensor forward_hidden(const at::Tensor& tokens, const PartRunner& run = run_part);

  // [..., dim] -> logits [..., vocab], in the model's dtype.
  at::Tensor head(const at::Tensor& hidden);

  [[nodiscard]] const LlamaConfig& config() const { return config_; }
  [[nodiscard]] std::int64_t max_seq() const { return cos_.size(0); }

 private:
  LlamaConfig config_;
  at::Tensor embedding_;  // [vocab, dim]
  std::vector<std::shared_ptr<LlamaBlock>> blocks_;
  at::Tensor norm_;  // [dim]
  at::Tensor head_;  // [vocab, dim]
  at::Tensor cos_;   // buffers [max_seq, head_dim]
  at::Tensor sin_;
};

}  // namespace ebb
