#include "test/soak/tiny_training.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "offload/guard.h"
#include "offload/parameters.h"
#include "policy/policies.h"

namespace ebb {
namespace {

constexpr std::int64_t kWidth = 16;

// What a user's forward pass might throw.
struct Interrupted {};

std::vector<at::Tensor> make_weights(c10::Device device, std::uint64_t seed) {
  at::manual_seed(seed);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) {
    weights.push_back((at::randn({kWidth, kWidth}) * 0.25).to(device).requires_grad_());
  }
  return weights;
}

// Finalizer of MurmurHash3: neighbouring ordinals get unrelated decisions.
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 33)) * 0xff51afd7ed558ccdULL;
  value = (value ^ (value >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return value ^ (value >> 33);
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  });
}

}  // namespace

TinyTraining::TinyTraining(c10::Device device, std::uint64_t seed, bool managed)
    : device_(device),
      random_(seed),
      offloader_(options(device, draw_)),
      weights_(make_weights(device, seed)),
      optimizer_(weights_, torch::optim::SGDOptions(1e-3)) {
  if (managed) {
    Parameters one_at_a_time;
    one_at_a_time.device_bytes = weights_.front().nbytes();
    one_at_a_time.minimum_bytes = 0;
    offloader_.manage(weights_, one_at_a_time);
  }
}

Options TinyTraining::options(c10::Device device, std::shared_ptr<Draw> draw) {
  Options options;
  options.device = device;
  options.policy = callback([draw = std::move(draw)](const Candidate& candidate) {
    return mixed(draw->salt + candidate.ordinal) % 8 < draw->kept_of_eight ? Decision::kKeep : Decision::kOffload;
  });
  return options;
}

at::Tensor TinyTraining::input() {
  const auto batch = std::uniform_int_distribution<std::int64_t>(1, 4)(random_);
  const auto sequence = std::uniform_int_distribution<std::int64_t>(1, 24)(random_);
  return at::randn({batch, sequence, kWidth}).to(device_);
}

at::Tensor TinyTraining::loss(const at::Tensor& input) const {
  const at::Tensor hidden = at::silu(at::matmul(input, weights_[0]));
  const at::Tensor scores = at::softmax(at::matmul(hidden, hidden.transpose(1, 2)) * 0.25, -1);
  const at::Tensor mixed_values = at::matmul(at::matmul(scores, hidden), weights_[1]);
  const at::Tensor output = at::matmul(at::tanh(mixed_values + input), weights_[2]);
  return (output * output).mean();
}

bool TinyTraining::run(StepKind kind, const at::Tensor& x, const at::Tensor& y, Offloader* offloader) const {
  std::optional<OffloadGuard> guard;
  if (offloader != nullptr) {
    guard.emplace(*offloader);
  }
  const at::Tensor first = loss(x);
  switch (kind) {
    case StepKind::kInside:
      first.backward();
      return true;
    case StepKind::kOutside:
      guard.reset();
      first.backward();
      return true;
    case StepKind::kRetained:
      first.backward({}, /*retain_graph=*/true);
      first.backward();
      return true;
    case StepKind::kDouble: {
      const auto slopes = torch::autograd::grad({first}, weights_, {}, /*retain_graph=*/true, /*create_graph=*/true);
      (slopes[0] * slopes[0]).sum().backward();
      return true;
    }
    case StepKind::kTwo: {
      const at::Tensor second = loss(y);
      first.backward();
      second.backward();
      return true;
    }
    case StepKind::kDropped:
      return false;
    case StepKind::kThrown:
      break;
  }
  throw Interrupted();
}

std::vector<at::Tensor> TinyTraining::gradients() const {
  std::vector<at::Tensor> all;
  std::transform(weights_.begin(), weights_.end(), std::back_inserter(all),
                 [](const at::Tensor& w) { return w.grad(); });
  return all;
}

bool TinyTraining::step(bool compare) {
  const auto kind = static_cast<StepKind>(steps_++ % kStepKinds);
  draw_->salt = random_();
  draw_->kept_of_eight = static_cast<unsigned>(random_() % 5);
  const at::Tensor x = input();
  const at::Tensor y = input();
  bool right = true;
  try {
    const bool has_gradients = run(kind, x, y, &offloader_);
    if (compare) {
      const auto offloaded = gradients();
      optimizer_.zero_grad();
      (void)run(kind, x, y, nullptr);
      right = equal(offloaded, gradients());
    }
    if (has_gradients) {
      optimizer_.step();
    }
  } catch (const Interrupted&) {
    // As a training loop does that skips a bad batch.
  }
  optimizer_.zero_grad();
  return right;
}

}  // namespace ebb
