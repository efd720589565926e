#include "bench/model/training.h"

#include <algorithm>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/checkpoint.h"
#include "offload/guard.h"
#include "offload/parameters.h"

namespace ebb {
namespace {

constexpr std::uint64_t kWeightSeed = 1;
constexpr std::uint64_t kTokenSeed = 2;
constexpr double kLearningRate = 1e-4;

Options offloader_options(const ModelOptions& model, c10::Device device, bool managed) {
  Options options;
  options.device = device;
  if (managed && model.budget_bytes) {
    options.device_budget = DeviceBytes{*model.budget_bytes};
    options.device_budget_is_a_wish = true;
  }
  options.record_trace = !model.trace.empty();
  return options;
}

at::Tensor run_checkpointed(const ModelPart& part, const at::Tensor& x) {
  return checkpoint([part](const std::vector<at::Tensor>& in) { return std::vector{part(in.front())}; }, {x},
                    EarlyStop::kYes)
      .front();
}

at::Tensor random_tokens(const ModelOptions& options, std::int64_t vocab, std::uint64_t seed, c10::Device device) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randint(0, vocab, {options.batch, options.sequence}, generator, at::kLong).to(device);
}

}  // namespace

Training::Training(const ModelOptions& options, c10::Device device, bool managed)
    : offloader_(offloader_options(options, device, managed)),
      model_(options.model(), options.sequence, kWeightSeed,
             at::TensorOptions().device(device).dtype(options.dtype == "float32" ? at::kFloat : at::kBFloat16),
             [&](const at::Tensor& parameter) {
               if (managed) {
                 Parameters how;
                 if (!options.budget_bytes) {
                   how.device_bytes = options.managed_bytes;
                 }
                 how.prefetch_bytes = options.prefetch_bytes;
                 how.resident_bytes = options.resident_bytes;
                 how.minimum_bytes = 64 << 10;  // all matrices of the smallest shape
                 how.gradients = options.manages("gradients");
                 how.states = options.manages("states");
                 offloader_.manage({parameter}, how);
               }
             }),
      optimizer_(model_.parameters(), torch::optim::AdamWOptions(kLearningRate), options.update, options.update_on),
      tokens_(random_tokens(options, options.model().vocab, kTokenSeed, device)),
      labels_(random_tokens(options, options.model().vocab, kTokenSeed + 1, device).flatten()) {}

at::Tensor Training::forward_and_backward() {
  at::Tensor loss;
  {
    const OffloadGuard guard(offloader_);
    const at::Tensor hidden = model_.forward_hidden(tokens_, run_checkpointed).flatten(0, 1);
    const std::int64_t count = hidden.size(0);
    const NoOpGuard head;
    for (std::int64_t begin = 0; begin < count; begin += kTokensOfHead) {
      const at::Tensor part = loss_of(hidden, begin, std::min(begin + kTokensOfHead, count));
      loss = loss.defined() ? loss + part : part;
    }
    loss = loss / count;
  }
  torch::autograd::backward({loss});
  return loss.detach();
}

void Training::update() {
  optimizer_.step();
  optimizer_.zero_grad();
}

// The sum over these tokens. What does not fit at once runs again in backward.
at::Tensor Training::loss_of(const at::Tensor& hidden, std::int64_t begin, std::int64_t end) {
  const ModelPart part = [this, begin, end](const at::Tensor& x) {
    const at::Tensor logits = model_.head(x).to(at::kFloat);
    return at::cross_entropy_loss(logits, labels_.slice(0, begin, end), /*weight=*/{}, at::Reduction::Sum);
  };
  const at::Tensor input = hidden.slice(0, begin, end);
  return hidden.size(0) > kTokensOfHead ? run_checkpointed(part, input) : part(input);
}

double Training::weights() const {
  const at::NoGradGuard no_grad;
  double sum = 0;
  for (const at::Tensor& parameter : model_.parameters()) {
    sum += parameter.abs().sum(at::kDouble).item<double>();
  }
  return sum;
}

}  // namespace ebb
