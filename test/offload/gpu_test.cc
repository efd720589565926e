#include <cstdlib>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "examples/llama/llama.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "streams/gpu/cuda_event.h"
#include "test/gpu/delays.h"
#include "test/offload/on_threads.h"
#include "test/random/device_bytes.h"

namespace ebb {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

// Plain autograd on a GPU does not agree with itself unless it is told to. cuBLAS reads its part of that when it is
// first used, so it is set before main.
const bool kDeterministic = [] {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/1);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  return true;
}();

Options gpu_options(std::uint64_t minimum_bytes = 4096) {
  Options options;
  options.device = kGpu;
  options.policy = minimum_size(minimum_bytes);
  return options;
}

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::randn(sizes, at::TensorOptions().device(kGpu).dtype(dtype)).mul_(0.1).requires_grad_();
}

void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    INFO("gradient " << i);
    CHECK(actual[i].equal(expected[i]));
  }
}

// A chain of matmuls wide enough that copies and kernels overlap for real.
std::vector<at::Tensor> chain(const std::vector<at::Tensor>& weights, const at::Tensor& input) {
  at::Tensor x = input;
  for (const at::Tensor& weight : weights) {
    x = at::silu(at::mm(x, weight)) + x.sigmoid();
  }
  return torch::autograd::grad({x.sum()}, weights);
}

std::vector<at::Tensor> chain_weights(int count) {
  at::manual_seed(1);
  std::vector<at::Tensor> weights;
  for (int i = 0; i < count; ++i) {
    weights.push_back(leaf({1024, 1024}));
  }
  return weights;
}

}  // namespace

TEST_CASE("a model's gradients on a GPU are those of plain autograd, bit for bit", "[gpu]") {
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kBFloat16);
  const LlamaConfig config{.vocab = 512, .dim = 256, .layers = 4, .heads = 8, .kv_heads = 4, .ffn = 704};
  Llama model(config, 256, 1, at::TensorOptions().device(kGpu).dtype(dtype));
  at::manual_seed(2);
  const at::Tensor tokens = at::randint(0, 512, {4, 256}, at::TensorOptions().device(kGpu).dtype(at::kLong));
  const auto step = [&](Offloader* offloader) {
    std::optional<OffloadGuard> guard;
    if (offloader != nullptr) {
      guard.emplace(*offloader);
    }
    const at::Tensor hidden = model.forward_hidden(tokens);
    const NoOpGuard head;
    return torch::autograd::grad({at::logsumexp(model.head(hidden).to(at::kFloat), -1).mean()}, model.parameters());
  };
  const std::vector<at::Tensor> expected = step(nullptr);
  Options options = gpu_options();
  options.host_memory = GENERATE(HostMemory::kPinned, HostMemory::kPageable);
  Offloader offloader(options);
  for (int i = 0; i < 3; ++i) {
    expect_equal(step(&offloader), expected);
  }
  const Stats stats = offloader.stats();
  CHECK(stats.offloaded.tensors > 0);
  CHECK(stats.fetched.tensors > 0);
  CHECK(stats.pool.now_bytes == 0);
  CHECK(stats.saved_on_device.now_bytes == stats.stash.now_bytes);
}

TEST_CASE("gradients are exact on a GPU however small stash and window are", "[gpu]") {
  const std::vector<at::Tensor> weights = chain_weights(12);
  const at::Tensor input = at::randn({1024, 1024}, at::TensorOptions().device(kGpu));
  const std::vector<at::Tensor> expected = chain(weights, input);
  Options options = gpu_options();
  options.stash_bytes = GENERATE(1, 4 << 20, 1 << 30);
  options.window_bytes = GENERATE(4 << 20, 1 << 30);
  Offloader offloader(options);
  for (int i = 0; i < 5; ++i) {
    const OffloadGuard guard(offloader);
    expect_equal(chain(weights, input), expected);
  }
  CHECK(offloader.stats().stash.peak_bytes <= std::max<std::uint64_t>(*options.stash_bytes, 4 << 20) + (4 << 20));
  CHECK(offloader.stats().window.peak_bytes <= *options.window_bytes);
}

TEST_CASE("after a step on a GPU all device memory is back, with and without backward", "[gpu]") {
  const std::vector<at::Tensor> weights = chain_weights(4);
  const at::Tensor input = at::randn({1024, 1024}, at::TensorOptions().device(kGpu));
  Offloader offloader(gpu_options());
  chain(weights, input);
  const std::uint64_t before = graphs::settled_device_bytes(kGpu);
  for (int i = 0; i < 3; ++i) {
    const OffloadGuard guard(offloader);
    chain(weights, input);
    static_cast<void>(at::mm(input, weights.front()).exp().sum());  // a graph that is dropped
  }
  offloader.drain();
  CHECK(graphs::device_bytes_at_rest(kGpu, before) <= before);
  CHECK(offloader.stats().pool.now_bytes == 0);
  CHECK(offloader.stats().saved_on_device.now_bytes == 0);
}

TEST_CASE("in steady state a step on a GPU pins no host memory, makes no event and never waits for the device",
          "[gpu]") {
  const std::vector<at::Tensor> weights = chain_weights(8);
  const at::Tensor input = at::randn({1024, 1024}, at::TensorOptions().device(kGpu));
  Options options = gpu_options();
  options.stash_bytes = GENERATE(std::optional<std::uint64_t>(), std::optional<std::uint64_t>(8 << 20));
  Offloader offloader(options);
  // The device starts the step only when the host may long be through with it.
  const auto late_step = [&] {
    for (int i = 0; i < 4; ++i) {
      test::spin();
    }
    const OffloadGuard guard(offloader);
    chain(weights, input);
  };
  constexpr int kFirstSteps = 4;
  for (int i = 0; i < kFirstSteps; ++i) {
    late_step();
    c10::cuda::device_synchronize();
  }
  const std::uint64_t growths = offloader.stats().pool_growths;
  const std::uint64_t events = CudaEventPool::made();
  CHECK(growths > 0);
  for (int i = 0; i < 10; ++i) {
    late_step();
    CHECK_FALSE(c10::cuda::getCurrentCUDAStream().query());
    c10::cuda::device_synchronize();
  }
  CHECK(offloader.stats().pool_growths == growths);
  CHECK(CudaEventPool::made() == events);
}

TEST_CASE("double backward and retained graphs are exact on a GPU", "[gpu]") {
  at::manual_seed(1);
  const at::Tensor weight = leaf({512, 512});
  const at::Tensor input = leaf({512, 512});
  const auto program = [&](Offloader* offloader) {
    std::optional<OffloadGuard> guard;
    if (offloader != nullptr) {
      guard.emplace(*offloader);
    }
    const at::Tensor loss = at::mm(input.sigmoid(), weight).tanh().square().sum();
    std::vector<at::Tensor> all;
    for (int i = 0; i < 3; ++i) {
      all.push_back(torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true)[0]);
    }
    const at::Tensor first = torch::autograd::grad({loss}, {weight}, {}, true, /*create_graph=*/true)[0];
    all.push_back(torch::autograd::grad({first.square().sum()}, {input})[0]);
    return all;
  };
  const std::vector<at::Tensor> expected = program(nullptr);
  Offloader offloader(gpu_options());
  for (int i = 0; i < 3; ++i) {
    expect_equal(program(&offloader), expected);
  }
}

TEST_CASE("forward and backward on a stream of the user's are exact", "[gpu]") {
  const std::vector<at::Tensor> weights = chain_weights(8);
  const at::Tensor input = at::randn({1024, 1024}, at::TensorOptions().device(kGpu));
  const std::vector<at::Tensor> expected = chain(weights, input);
  Options options = gpu_options();
  options.stash_bytes = 1;
  Offloader offloader(options);
  c10::cuda::device_synchronize();
  for (int i = 0; i < 4; ++i) {
    std::vector<at::Tensor> actual;
    {
      const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool(false, 0));
      const OffloadGuard guard(offloader);
      actual = chain(weights, input);
      stream.current_stream().synchronize();
    }
    expect_equal(actual, expected);
  }
}

TEST_CASE("several threads share one offloader on a GPU and each gets its own gradients", "[gpu]") {
  const std::vector<at::Tensor> weights = chain_weights(6);
  constexpr int kThreads = 4;
  std::vector<at::Tensor> inputs;
  std::vector<std::vector<at::Tensor>> expected;
  for (int i = 0; i < kThreads; ++i) {
    inputs.push_back(at::randn({512, 1024}, at::TensorOptions().device(kGpu)));
    expected.push_back(chain(weights, inputs.back()));
  }
  Options options = gpu_options();
  options.stash_bytes = 4 << 20;
  Offloader offloader(options);
  std::vector<std::vector<at::Tensor>> actual(kThreads);
  on_threads(kThreads, [&](std::size_t i) {
    for (int step = 0; step < 5; ++step) {
      const OffloadGuard guard(offloader);
      actual[i] = chain(weights, inputs[i]);
    }
  });
  for (int i = 0; i < kThreads; ++i) {
    expect_equal(actual[i], expected[i]);
  }
}

TEST_CASE("CPU tensors in a GPU graph pass through", "[gpu]") {
  Offloader offloader(gpu_options(1));
  const at::Tensor on_cpu = at::randn({64, 64}).requires_grad_();
  const OffloadGuard guard(offloader);
  const at::Tensor loss = on_cpu.exp().to(kGpu).exp().sum();
  const at::Tensor gradient = torch::autograd::grad({loss}, {on_cpu})[0];
  CHECK(offloader.stats().kept_for(KeptReason::kOtherDevice).tensors > 0);
  CHECK(offloader.stats().offloaded.tensors > 0);
  CHECK(gradient.isfinite().all().item<bool>());
}

TEST_CASE("a GPU that is not the current one is served", "[gpu][multi_gpu]") {
  Options options = gpu_options();
  options.device = c10::Device(c10::kCUDA, 1);
  Offloader offloader(options);
  at::manual_seed(3);
  const at::Tensor weight =
      at::randn({1024, 1024}, at::TensorOptions().device(*options.device)).mul_(0.1).requires_grad_();
  const c10::cuda::CUDAGuard current(0);
  const std::vector<at::Tensor> expected = chain({weight, weight}, weight.detach());
  const OffloadGuard guard(offloader);
  expect_equal(chain({weight, weight}, weight.detach()), expected);
  CHECK(offloader.stats().offloaded.tensors > 0);
}

}  // namespace ebb
