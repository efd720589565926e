#pragma once

#include <cstdint>
#include <string>

#include "bench/step/shape.h"

namespace ebb {

// Llama-3-8B's width with `size` layers (batch 8, 1024 tokens), or a batch of `size` (9 layers, 1024 tokens), or
// sequences of `size` times 1024 tokens (9 layers, batch 1). `dimension`: "layers", "batch" or "sequence".
[[nodiscard]] LlamaShape fits_shape(const std::string& dimension, std::int64_t size);

// About how large the dimension can be within so many bytes, as the start of a search: from the sizes of the weights,
// the gradients, the saves of each block and the loss. `config`: as in FitsOptions.
[[nodiscard]] std::int64_t guess_largest(const std::string& dimension, const std::string& config,
                                         std::uint64_t device_bytes, std::uint64_t bytes_per_value);

}  // namespace ebb
