#include "test/faults/step.h"

#include <optional>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"

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

Step::Step(c10::Device device)
    : input_(values(device, 0.37)), weight_(values(device, 0.11).mul_(0.2).requires_grad_()) {
  forget_failed_backward();  // makes what that keeps for good
}

std::vector<at::Tensor> Step::run(Offloader* offloader) const {
  std::optional<OffloadGuard> guard;
  if (offloader != nullptr) {
    guard.emplace(*offloader);
  }
  at::Tensor x = at::mm(input_, weight_);
  for (int layer = 0; layer < kLayers; ++layer) {
    x = at::mm(at::silu(x), x.t()).tanh() + x.exp().clamp_max(2.0);
    x = x * x.narrow(0, 0, 1);
    x = x / (x.abs().amax() + 1);
  }
  const at::Tensor loss = x.sum();
  std::vector<at::Tensor> gradients = torch::autograd::grad({loss}, {weight_}, {}, /*retain_graph=*/true);
  gradients.push_back(torch::autograd::grad({loss}, {weight_}).front());
  return gradients;
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
