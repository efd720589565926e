#include "examples/train/batches.h"

#include <random>
#include <stdexcept>
#include <string>

#include <ATen/ops/empty.h>

namespace ebb {
namespace {

std::mt19937_64 generator_for(std::uint64_t seed, std::int64_t step) {
  std::seed_seq mixed{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)};
  return std::mt19937_64(mixed);
}

}  // namespace

Batches::Batches(std::string_view text, std::int64_t batch, std::int64_t seq, std::uint64_t seed)
    : text_(text), batch_(batch), seq_(seq), seed_(seed) {
  const auto needed = static_cast<std::uint64_t>(batch) * static_cast<std::uint64_t>(seq) + 1;
  if (text.size() < needed) {
    throw std::invalid_argument("the text has " + std::to_string(text.size()) + " bytes, and one batch of " +
                                std::to_string(batch) + " x " + std::to_string(seq) + " needs " +
                                std::to_string(needed));
  }
}

Batches::Batch Batches::at(std::int64_t step) const {
  auto generator = generator_for(seed_, step);
  const std::uint64_t starts = text_.size() - static_cast<std::uint64_t>(seq_);
  Batch batch{at::empty({batch_, seq_}, at::kLong), at::empty({batch_, seq_}, at::kLong)};
  auto* inputs = batch.inputs.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < batch_; ++row) {
    // Modulo, not uniform_int_distribution: the standard leaves that one's results to the library.
    const auto* crop = reinterpret_cast<const unsigned char*>(text_.data()) + generator() % starts;
    for (std::int64_t i = 0; i < seq_; ++i) {
      *inputs++ = crop[i];
      *targets++ = crop[i + 1];
    }
  }
  return batch;
}

}  // namespace ebb
