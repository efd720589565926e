#include "bench/published/paths.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/autograd.h>

#include "bench/step/measure.h"
#include "examples/common/device.h"
#include "offload/checkpoint.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"

namespace ebb {
namespace {

constexpr std::int64_t kSide = 256;

at::Tensor path(const PathsCase& paths_case, const at::Tensor& t0, const at::Tensor& a) {
  const auto activation = [&](const at::Tensor& t) { return paths_case.trained ? at::silu(t) : at::relu(t); };
  at::Tensor t = activation(t0);
  t = at::matmul(t, t);
  t = activation(t);
  return at::matmul(t, a);
}

at::Tensor checkpointed_path(const PathsCase& paths_case, const at::Tensor& t0, const at::Tensor& a) {
  const auto function = [paths_case](const std::vector<at::Tensor>& in) {
    return std::vector{path(paths_case, in[0], in[1])};
  };
  return checkpoint(function, {t0, a}).front();
}

Options offload_options(const std::string& config, c10::Device device) {
  Options options;
  options.device = device;
  options.enabled = config == "recipes";
  options.policy = recompute(Recompute::kComputeBound);
  return options;
}

}  // namespace

PathsCase paths_case(const std::string& name) {
  for (const PathsCase& each : {PathsCase{"chain"}, PathsCase{"sum", true}, PathsCase{"trained", true, true}}) {
    if (each.name == name) {
      return each;
    }
  }
  throw std::invalid_argument("unknown case \"" + name + "\": there are chain, sum, trained");
}

std::vector<std::string> paths_configs(const PathsCase& paths_case) {
  return paths_case.trained ? std::vector<std::string>{"none", "checkpoint", "recipes"}
                            : std::vector<std::string>{"none", "checkpoint"};
}

Paths::Paths(const PathsCase& paths_case, int n, c10::Device device) : case_(paths_case), device_(device) {
  constexpr std::uint64_t kSeed = 1;
  constexpr double kDeviation = 0.01;  // with which a path neither blows its input up nor makes it vanish
  const at::Generator generator = at::detail::createCPUGenerator(kSeed);
  const auto draw = [&] { return at::randn({kSide, kSide}, generator).mul_(kDeviation).to(device); };
  for (int i = 0; i < n; ++i) {
    starts_.push_back(case_.trained && i > 0 ? starts_.front() : draw().set_requires_grad(case_.trained));
  }
  a_ = draw().set_requires_grad(true);
  gradient_ = draw();
}

at::Tensor Paths::forward(bool checkpointed) const {
  at::Tensor result = case_.summed ? at::Tensor() : a_;
  for (const at::Tensor& t0 : starts_) {
    const at::Tensor& a = case_.summed ? a_ : result;
    const at::Tensor next = checkpointed ? checkpointed_path(case_, t0, a) : path(case_, t0, a);
    result = case_.summed && result.defined() ? result + next : next;
  }
  return result;
}

std::vector<at::Tensor> Paths::trained() const {
  return case_.trained ? std::vector{a_, starts_.front()} : std::vector{a_};
}

std::vector<at::Tensor> Paths::backward(const at::Tensor& result) const {
  return torch::autograd::grad({result}, trained(), {gradient_});
}

Paths::Memory Paths::measure(const std::string& config, DeviceMemory& memory) const {
  Offloader offloader(offload_options(config, device_));
  const OffloadGuard guard(offloader);
  Memory result;
  for (int i = 0; i < 2; ++i) {
    offloader.reset_stats();
    const std::uint64_t before = memory.now_bytes();
    const at::Tensor output = forward(config == "checkpoint");
    offloader.drain();
    synchronize(device_);
    const std::uint64_t start = memory.now_bytes();
    memory.reset();
    static_cast<void>(backward(output));
    synchronize(device_);
    result = {start - before, memory.peak_bytes() - start, offloader.stats().recomputed.bytes};
  }
  return result;
}

bool Paths::gradients_equal(const std::string& config) const {
  const std::vector<at::Tensor> expected = backward(forward(/*checkpointed=*/false));
  Offloader offloader(offload_options(config, device_));
  const OffloadGuard guard(offloader);
  constexpr int kSteps = 2;  // the first learns the order of reads, the second follows it
  for (int i = 0; i < kSteps; ++i) {
    const std::vector<at::Tensor> actual = backward(forward(config == "checkpoint"));
    if (!std::equal(expected.begin(), expected.end(), actual.begin(), actual.end(), same_bits)) {
      return false;
    }
  }
  return true;
}

}  // namespace ebb
