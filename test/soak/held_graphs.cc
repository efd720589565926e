#include "test/soak/held_graphs.h"

#include <optional>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"
#include "policy/policies.h"

namespace ebb {
namespace {

constexpr std::int64_t kWidth = 16;
constexpr std::size_t kMostGraphs = 1000;

Options options_of(c10::Device device, const HeldGraphs::Choices& choices) {
  Options options;
  options.device = device;
  if (choices.budget) {
    options.device_budget = LeastMemory{};
    options.planned_minimum_bytes = 1;
  } else {
    options.policy = offload_everything();
    options.stash_bytes = 1;
  }
  return options;
}

at::Tensor values(c10::Device device, double step) {
  return at::arange(kWidth * kWidth, at::TensorOptions().dtype(at::kFloat).device(device))
      .mul(step)
      .sin()
      .view({kWidth, kWidth});
}

at::Tensor output(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor hidden = at::silu(at::matmul(x, weight));
  return (at::tanh(hidden * x) * hidden).sum();
}

at::Tensor slope(const at::Tensor& out, const at::Tensor& weight, bool retain, bool create = false) {
  return torch::autograd::grad({out}, {weight}, {}, retain, create).front();
}

}  // namespace

const std::map<std::string, Held>& held_names() {
  static const std::map<std::string, Held> names{
      {"one-save", Held::kOneSave}, {"many-graphs", Held::kManyGraphs}, {"one-graph", Held::kOneGraph}};
  return names;
}

HeldGraphs::HeldGraphs(c10::Device device, const Choices& choices)
    : choices_(choices),
      offloader_(options_of(device, choices)),
      weight_(values(device, 0.11).requires_grad_()),
      input_(values(device, 0.37)),
      expected_(slope(output(input_, weight_), weight_, /*retain=*/false)) {
  held_.push_back(forward(input_));
}

at::Tensor HeldGraphs::forward(const at::Tensor& x) const {
  std::optional<OffloadGuard> guard;
  if (!choices_.plain) {
    guard.emplace(offloader_);
  }
  return output(x, weight_);
}

void HeldGraphs::step() {
  switch (choices_.held) {
    case Held::kOneSave:
      return drop_one();
    case Held::kManyGraphs:
      return add_one();
    case Held::kOneGraph:
      return derive_again();
  }
}

void HeldGraphs::drop_one() const { (void)forward(input_); }

// Every other one keeps its saves.
void HeldGraphs::add_one() {
  held_.push_back(forward(input_));
  (void)slope(held_.back(), weight_, /*retain=*/++steps_ % 2 == 0);
  if (held_.size() > kMostGraphs) {
    held_.erase(held_.begin() + 1);
  }
}

void HeldGraphs::derive_again() const {
  std::optional<OffloadGuard> guard;
  if (!choices_.plain) {
    guard.emplace(offloader_);
  }
  const at::Tensor first = slope(held_.front(), weight_, /*retain=*/true, /*create=*/true);
  (void)slope(first.square().sum(), weight_, /*retain=*/true);
}

bool HeldGraphs::release() {
  const bool right = slope(held_.front(), weight_, /*retain=*/false).equal(expected_);
  held_.clear();
  offloader_.drain();
  const Stats stats = offloader_.stats();
  return right &&
         stats.pool.now_bytes + stats.stash.now_bytes + stats.window.now_bytes + stats.saved_on_device.now_bytes == 0;
}

}  // namespace ebb
