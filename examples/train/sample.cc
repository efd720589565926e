#include "examples/train/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "examples/llama/llama.h"

namespace ebb {
namespace {

constexpr double kTemperature = 0.8;
constexpr std::size_t kLikeliest = 40;

// The model's logits for the byte after `text`, of which it sees as much as it has positions for.
std::vector<float> next_logits(Llama& model, const std::string& text, c10::Device device) {
  const auto seen = std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), model.max_seq());
  auto tokens = at::empty({1, seen}, at::kLong);
  std::transform(text.end() - seen, text.end(), tokens.mutable_data_ptr<std::int64_t>(),
                 [](char c) { return static_cast<unsigned char>(c); });
  const auto hidden = model.forward_hidden(tokens.to(device)).select(1, seen - 1);
  const auto logits = model.head(hidden).to(at::kFloat).cpu().contiguous();
  return {logits.const_data_ptr<float>(), logits.const_data_ptr<float>() + logits.numel()};
}

// Draws by hand, not with std::discrete_distribution: the standard leaves that one's results to the library.
std::size_t draw(const std::vector<float>& logits, std::mt19937_64& generator) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  order.resize(std::min(order.size(), kLikeliest));
  std::vector<double> up_to;
  up_to.reserve(order.size());
  double sum = 0;
  for (const std::size_t i : order) {
    sum += std::exp((logits[i] - logits[order.front()]) / kTemperature);
    up_to.push_back(sum);
  }
  const double at = sum * static_cast<double>(generator() >> 11) * 0x1p-53;
  const auto drawn = std::upper_bound(up_to.begin(), up_to.end(), at) - up_to.begin();
  return order[std::min(static_cast<std::size_t>(drawn), order.size() - 1)];
}

}  // namespace

std::string sample_text(Llama& model, const std::string& prompt, std::int64_t bytes, std::uint64_t seed,
                        c10::Device device) {
  const at::NoGradGuard no_grad;
  std::mt19937_64 generator(seed);
  std::string text = prompt;
  for (std::int64_t i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(draw(next_logits(model, text, device), generator)));
  }
  return text.substr(prompt.size());
}

std::string printable(const std::string& bytes) {
  std::string shown = bytes;
  std::replace_if(
      shown.begin(), shown.end(), [](char c) { return c != '\n' && (c < ' ' || c > '~'); }, '.');
  return shown;
}

}  // namespace ebb
