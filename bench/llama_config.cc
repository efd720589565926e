#include "bench/llama_config.h"

#include <stdexcept>
#include <string>

namespace ebb {
namespace {

void require_positive(const char* name, std::int64_t value) {
  if (value <= 0) {
    throw std::invalid_argument(std::string(name) + " must be at least 1, got " + std::to_string(value));
  }
}

void require_divides(const char* part, std::int64_t divisor, const char* whole, std::int64_t value) {
  if (value % divisor != 0) {
    throw std::invalid_argument(std::string(part) + " must divide " + whole + ": " + std::to_string(value) +
                                " is not a multiple of " + std::to_string(divisor));
  }
}

}  // namespace

void validate(const LlamaConfig& config) {
  require_positive("vocab", config.vocab);
  require_positive("dim", config.dim);
  require_positive("layers", config.layers);
  require_positive("heads", config.heads);
  require_positive("kv-heads", config.kv_heads);
  require_positive("ffn", config.ffn);
  require_divides("heads", config.heads, "dim", config.dim);
  require_divides("kv-heads", config.kv_heads, "heads", config.heads);
  const std::int64_t head_dim = config.dim / config.heads;
  if (head_dim % 2 != 0) {
    throw std::invalid_argument("dim / heads must be even for rope, got " + std::to_string(head_dim));
  }
  if (!(config.rope_theta > 0)) {
    throw std::invalid_argument("rope-theta must be positive, got " + std::to_string(config.rope_theta));
  }
}

std::int64_t parameter_count(const LlamaConfig& config) {
  const std::int64_t kv_dim = config.dim / config.heads * config.kv_heads;
  const std::int64_t attention = 2 * config.dim * (config.dim + kv_dim);
  const std::int64_t block = attention + 3 * config.dim * config.ffn + 2 * config.dim;
  return 2 * config.vocab * config.dim + config.layers * block + config.dim;
}

}  // namespace ebb
