#pragma once

#include <cstdint>

namespace ebb {

// The sizes of a Llama-style model. The defaults are the byte-level model that `./dev train` trains on a small machine.
struct LlamaConfig {
  std::int64_t vocab = 256;
  std::int64_t dim = 256;
  std::int64_t layers = 8;
  std::int64_t heads = 8;
  std::int64_t kv_heads = 4;
  std::int64_t ffn = 704;
  double rope_theta = 10000.0;

  bool operator==(const LlamaConfig&) const = default;
};

// Throws std::invalid_argument with one sentence that names the sizes which do not fit together.
void validate(const LlamaConfig& config);

// The number of trained values in a model of these sizes.
std::int64_t parameter_count(const LlamaConfig& config);

}  // namespace ebb
