#include "test/faults/step.h"

#include <cstddef>
#include <exception>
#include <optional>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"
#include "offload/parameters.h"

namespace ebb::faults {
namespace {

constexpr int kLayers = 2;
constexpr std::int64_t kSide = 48;

const at::Tensor& oldest_graph() {
  static const auto* const oldest = new at::Tensor(at::ones({}).requires_grad_().mul(2));
  return *oldest;
}

at::Tensor values(c10::Device device, double step) {
  const at::Tensor count = at::arange(kSide * kSide, at::TensorOptions().dtype(at::kFloat).device(device));
  return count.mul(step).sin_().view({kSide, kSide});
}

}  // namespace

Step::Step(c10::Device device) : input_(values(device, 0.37)), weight_(values(device, 0.11).mul_(0.2)) {
  forget_failed_backward();  // makes what that keeps for good
}

std::vector<at::Tensor> Step::make_weights() const {
  std::vector<at::Tensor> weights;
  for (int layer = 0; layer <= kLayers; ++layer) {
    weights.push_back((weight_ * (1 + layer)).requires_grad_());
  }
  return weights;
}

std::vector<at::Tensor> Step::run(Offloader* offloader, bool managed) {
  weights_ = make_weights();
  std::optional<OffloadGuard> guard;
  if (offloader != nullptr) {
    if (managed) {
      Parameters one_at_a_time;
      one_at_a_time.device_bytes = weight_.nbytes();
      one_at_a_time.minimum_bytes = 0;
      offloader->manage(weights_, one_at_a_time);
    }
    guard.emplace(*offloader);
  }
  at::Tensor x = at::mm(input_, weights_.back());
  for (int layer = 0; layer < kLayers; ++layer) {
    x = at::mm(at::silu(x), x.t()).tanh() + x.exp().clamp_max(2.0) * weights_[static_cast<std::size_t>(layer)];
    x = x * x.narrow(0, 0, 1);
    x = x / (x.abs().amax() + 1);
  }
  const at::Tensor loss = x.sum();
  std::vector<at::Tensor> results = torch::autograd::grad({loss}, weights_, {}, /*retain_graph=*/true);
  for (const at::Tensor& gradient : torch::autograd::grad({loss}, weights_)) {
    results.push_back(gradient);
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    weights_[i].sub_(results[i] * 0.1);
  }
  for (const at::Tensor& weight : weights_) {
    results.push_back(weight.clone());
  }
  if (updated_.empty()) {
    updated_.assign(results.end() - static_cast<std::ptrdiff_t>(weights_.size()), results.end());
  }
  return results;
}

bool Step::weights_are_whole() {
  const std::vector<at::Tensor> before = make_weights();
  const at::NoGradGuard no_grad;
  bool whole = true;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    try {
      const at::Tensor found = weights_[i].clone();
      whole = whole && (found.equal(before[i]) || found.equal(updated_[i]));
    } catch (const std::exception&) {
      whole = false;
    }
  }
  weights_.clear();
  return whole;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) {
    same = a[i].equal(b[i]) && a[i].strides() == b[i].strides();
  }
  return same;
}

void forget_failed_backward() { oldest_graph().backward({}, /*retain_graph=*/true); }

}  // namespace ebb::faults
