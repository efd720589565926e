#include "examples/llama/config.h"

#include <stdexcept>
#include <string>

namespace ebb {
namespace {

// So that parameter_count cannot overflow.
constexpr std::int64_t kLargestSize = 1 << 20;

void require_size(const char* name, std::int64_t value) {
  if (value <= 0) {
    throw std::invalid_argument(std::string(name) + " must be at least 1, got " + std::to_string(value));
  }
  if (value > kLargestSize) {
    throw std::invalid_argument(std::string(name) + " must be at most " + std::to_string(kLargestSize) + ", got " +
                                std::to_string(value));
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
  require_size("vocab", config.vocab);
  require_size("dim", config.dim);
  require_size("layers", config.layers);
  require_size("heads", config.heads);
  require_size("kv-heads", config.kv_heads);
  require_size("ffn", config.ffn);
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
