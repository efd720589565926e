#include "bench/step_workload.h"

#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "bench/llama.h"
#include "offload/guard.h"
#include "offload/offloader.h"

namespace ebb {
namespace {

constexpr std::uint64_t kWeightSeed = 1;
constexpr std::uint64_t kTokenSeed = 2;

}  // namespace

StepWorkload::StepWorkload(const StepShape& shape, at::ScalarType dtype, c10::Device device)
    : model_(std::make_shared<Llama>(shape.model, shape.sequence, kWeightSeed,
                                     at::TensorOptions().device(device).dtype(dtype))) {
  const at::Generator generator = at::detail::createCPUGenerator(kTokenSeed);
  tokens_ = at::randint(0, shape.model.vocab, {shape.batch, shape.sequence}, generator, at::kLong).to(device);
}

StepWorkload::~StepWorkload() = default;

std::vector<at::Tensor> StepWorkload::step(Offloader* offloader, const std::function<void()>& after_forward) {
  std::optional<OffloadGuard> guard;
  if (offloader != nullptr) {
    guard.emplace(*offloader);
  }
  const at::Tensor hidden = model_->forward_hidden(tokens_);
  at::Tensor loss;
  {
    const NoOpGuard head;
    const at::Tensor logits = model_->head(hidden);
    if (after_forward) {
      after_forward();
    }
    loss = at::logsumexp(logits.to(at::kFloat), -1).mean();
  }
  return torch::autograd::grad({loss}, model_->parameters());
}

}  // namespace ebb
