#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "bench/model/options.h"
#include "examples/llama/llama.h"
#include "offload/offloader.h"
#include "offload/optimizer.h"

namespace ebb {

// A Llama on random tokens with AdamW: weights, masters in float32 where the weights are smaller, and moments. Every
// block is a checkpointed region, whose inputs move, and the head takes kTokensOfHead tokens at a time.
class Training {
 public:
  static constexpr std::int64_t kTokensOfHead = 4096;

  // `managed`: weights, gradients and states live in host memory, or without a GPU in a spill file, and no more of them
  // than the bound are on the device, but for what one update takes. Otherwise all of them stay on the device.
  Training(const ModelOptions& options, c10::Device device, bool managed);

  // One step is both of these. Returns the loss, a float32 on the device.
  at::Tensor forward_and_backward();
  void update();

  // The sum of all weights' magnitudes, for a comparison of runs.
  [[nodiscard]] double weights() const;

  [[nodiscard]] Offloader& offloader() { return offloader_; }

 private:
  [[nodiscard]] at::Tensor loss_of(const at::Tensor& hidden, std::int64_t begin, std::int64_t end);

  Offloader offloader_;  // first: the model's tensors are managed by it
  Llama model_;
  AdamW optimizer_;
  at::Tensor tokens_;  // int64 [batch, sequence]
  at::Tensor labels_;  // int64 [batch * sequence]
};

}  // namespace ebb
