#include "bench/fits/shape.h"

#include <algorithm>

namespace ebb {
namespace {

// Fitted to W1 on an H200 (docs/benchmarks.md): a block saves four tensors of the MLP's width and some seven of the
// model's, and the loss takes the logits, their float32 copy and two more of it, and a gradient where that has another
// dtype.
double estimated_peak_bytes(const LlamaShape& shape, const std::string& config, double bytes_per_value) {
  constexpr double kFloatBytes = 4;
  constexpr double kSavedOfWidth = 6.6;
  constexpr double kCopiesInFlight = 3e9;
  const auto& model = shape.model;
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  const double weights = static_cast<double>(parameter_count(model)) * bytes_per_value;
  const double width = tokens * static_cast<double>(model.dim) * bytes_per_value;
  const double block = kSavedOfWidth * width + 4 * tokens * static_cast<double>(model.ffn) * bytes_per_value;
  const double logits = tokens * static_cast<double>(model.vocab);
  const double loss = logits * (3 * kFloatBytes + (bytes_per_value < kFloatBytes ? 2 : 1) * bytes_per_value);
  const auto layers = static_cast<double>(model.layers);
  double saved = layers * block;
  if (config == "checkpoint") {
    saved = layers * width;
  } else if (config != "none") {
    saved = std::min(saved, kCopiesInFlight);
  }
  return std::max(weights + saved + loss, 2 * weights + block);
}

}  // namespace

LlamaShape fits_shape(const std::string& dimension, std::int64_t size) {
  constexpr std::int64_t kTokens = 1024;
  LlamaShape shape = std::get<LlamaShape>(step_shape("w1").sizes);
  if (dimension == "layers") {
    shape.model.layers = size;
  } else if (dimension == "batch") {
    shape.batch = size;
  } else {
    shape.batch = 1;
    shape.sequence = size * kTokens;
  }
  return shape;
}

std::int64_t guess_largest(const std::string& dimension, const std::string& config, std::uint64_t device_bytes,
                           std::uint64_t bytes_per_value) {
  const auto fits = [&](std::int64_t size) {
    return estimated_peak_bytes(fits_shape(dimension, size), config, static_cast<double>(bytes_per_value)) <=
           static_cast<double>(device_bytes);
  };
  std::int64_t size = 1;
  while (fits(size + 1)) {
    ++size;
  }
  return size;
}

}  // namespace ebb
