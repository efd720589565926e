// Graphs on GPUs that leave the beaten track: streams, devices, threads.

#include <array>
#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "test/offload/on_threads.h"
#include "test/random/device_bytes.h"

namespace ebb {
namespace {

using torch::autograd::grad;

c10::Device gpu(c10::DeviceIndex index = 0) { return {c10::kCUDA, index}; }

Options everything_on(c10::Device device) {
  Options options;
  options.device = device;
  options.policy = offload_everything();
  options.stash_bytes = 1;  // sources go at once: backward has to copy in
  return options;
}

at::Tensor leaf(c10::Device device) {
  return at::linspace(-1, 1, 1 << 18, at::TensorOptions(device)).view({512, 512}).requires_grad_();
}

// Elementwise, so that it is exact on whatever stream and device.
at::Tensor forward(const at::Tensor& input) {
  at::Tensor x = input * 1.5;
  for (int i = 0; i < 8; ++i) {
    x = x.sin() * x.sigmoid() + x;
  }
  return x.square().mean();
}

at::Tensor plain_gradient(c10::Device device) {
  const at::Tensor x = leaf(device);
  return grad({forward(x)}, {x})[0];
}

// What the program makes of `x` under the offloader's guard.
template <typename Program>
at::Tensor guarded(Offloader& offloader, const Program& program, const at::Tensor& x) {
  const OffloadGuard guard(offloader);
  return program(x);
}

void check_nothing_held(const Offloader& offloader) {
  const Stats stats = offloader.stats();
  CHECK(stats.pool.now_bytes == 0);
  CHECK(stats.window.now_bytes == 0);
}

}  // namespace

TEST_CASE("forward on streams other than the one current when the offloader was made is exact", "[gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  for (int i = 0; i < 4; ++i) {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
    at::Tensor gradient;
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream);
      const at::Tensor x = leaf(gpu());
      const OffloadGuard guard(offloader);
      gradient = grad({forward(x)}, {x})[0];
    }
    stream.synchronize();
    CHECK(gradient.equal(expected));
  }
  CHECK(offloader.stats().fetched.tensors > 0);
  offloader.drain();
  check_nothing_held(offloader);
}

TEST_CASE("a graph whose parts were made on two streams is exact", "[gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  const c10::cuda::CUDAStream first = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStream second = c10::cuda::getStreamFromPool();
  const at::Tensor x = leaf(gpu());
  c10::cuda::device_synchronize();
  at::Tensor losses[2];
  for (const int i : {0, 1}) {
    const c10::cuda::CUDAStreamGuard on_stream(i == 0 ? first : second);
    losses[i] = guarded(offloader, forward, x);
  }
  c10::cuda::device_synchronize();
  CHECK(grad({losses[0]}, {x})[0].equal(expected));
  CHECK(grad({losses[1]}, {x})[0].equal(expected));
}

TEST_CASE("nodes of the CPU and of a GPU in one graph are exact in either one's offloader", "[gpu]") {
  const auto mixed = [](const at::Tensor& x) {
    const at::Tensor there = (x * 1.5).sin().to(gpu());
    return ((there * there.exp()).cpu().sigmoid() * x).square().sum();
  };
  const at::Tensor x = leaf(c10::kCPU);
  const at::Tensor expected = grad({mixed(x)}, {x})[0];
  for (const c10::Device device : {gpu(), c10::Device(c10::kCPU)}) {
    Offloader offloader(everything_on(device));
    const at::Tensor loss = guarded(offloader, mixed, x);
    CHECK(offloader.stats().kept_for(KeptReason::kOtherDevice).tensors > 0);
    CHECK(offloader.stats().offloaded.tensors > 0);
    CHECK(grad({loss}, {x})[0].equal(expected));
  }
}

TEST_CASE("nested guards of a CPU's and a GPU's offloader each move their own part of one graph", "[gpu]") {
  Offloader on_cpu(everything_on(c10::kCPU));
  Offloader on_gpu(everything_on(gpu()));
  const auto program = [&](bool guarded) {
    const at::Tensor x = leaf(c10::kCPU);
    at::Tensor loss;
    {
      const auto outer = guarded ? std::make_unique<OffloadGuard>(on_cpu) : nullptr;
      const at::Tensor hidden = (x * 1.5).sin().exp();
      const auto inner = guarded ? std::make_unique<OffloadGuard>(on_gpu) : nullptr;
      loss = forward(hidden.to(gpu()));
    }
    return grad({loss}, {x})[0];
  };
  const at::Tensor expected = program(false);
  CHECK(program(true).equal(expected));
  CHECK(on_cpu.stats().fetched.tensors > 0);
  CHECK(on_gpu.stats().fetched.tensors > 0);
}

TEST_CASE("ten passes over a retained graph on a GPU are the same to the bit and hold nothing in between", "[gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  const at::Tensor x = leaf(gpu());
  const at::Tensor loss = guarded(offloader, forward, x);
  for (int pass = 0; pass < 10; ++pass) {
    CHECK(grad({loss}, {x}, {}, /*retain_graph=*/true)[0].equal(expected));
    CHECK(offloader.stats().saved_on_device.now_bytes == 0);
  }
}

TEST_CASE("graphs that are dropped on a GPU with copies under way give all device memory back", "[gpu]") {
  const at::Tensor x = leaf(gpu());
  Options options = everything_on(gpu());
  options.stash_bytes = std::nullopt;
  Offloader offloader(options);
  const std::uint64_t before = graphs::settled_device_bytes(gpu());
  for (int i = 0; i < 50; ++i) {
    const OffloadGuard guard(offloader);
    static_cast<void>(forward(x));
  }
  offloader.drain();
  CHECK(graphs::device_bytes_at_rest(gpu(), before) <= before);
  check_nothing_held(offloader);
}

TEST_CASE("four threads that go backward at once through one retained graph on a GPU get the same gradients", "[gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  const at::Tensor x = leaf(gpu());
  const at::Tensor loss = guarded(offloader, forward, x);
  std::array<at::Tensor, 4> found;
  on_threads(found.size(), [&](std::size_t i) { found[i] = grad({loss}, {x}, {}, /*retain_graph=*/true)[0]; });
  for (const at::Tensor& gradient : found) {
    CHECK(gradient.equal(expected));
  }
}

TEST_CASE("backward on another stream than forward's is exact", "[gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  const at::Tensor x = leaf(gpu());
  const at::Tensor loss = guarded(offloader, forward, x);
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  at::Tensor gradient;
  {
    const c10::cuda::CUDAStreamGuard on_stream(stream);
    gradient = grad({loss}, {x})[0];
  }
  c10::cuda::device_synchronize();
  CHECK(gradient.equal(expected));
}

TEST_CASE("the second derivative on a GPU is exact, its saves made on the device's thread", "[gpu]") {
  const auto program = [](Offloader* offloader) {
    const at::Tensor x = leaf(gpu());
    const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
    const at::Tensor first = grad({forward(x)}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return grad({first.square().sum()}, {x})[0];
  };
  const at::Tensor expected = program(nullptr);
  Offloader offloader(everything_on(gpu()));
  CHECK(program(&offloader).equal(expected));
  Offloader forward_only(everything_on(gpu()));
  static_cast<void>(guarded(forward_only, forward, leaf(gpu())));
  CHECK(offloader.stats().saved.tensors > forward_only.stats().saved.tensors);
}

TEST_CASE("a current device that is not the tensors' changes nothing, in forward or in backward", "[gpu][multi_gpu]") {
  const at::Tensor expected = plain_gradient(gpu());
  Offloader offloader(everything_on(gpu()));
  const at::Tensor x = leaf(gpu());
  const c10::cuda::CUDAGuard elsewhere(1);
  const at::Tensor loss = guarded(offloader, forward, x);
  CHECK(offloader.stats().offloaded.tensors > 0);
  CHECK(grad({loss}, {x})[0].equal(expected));
  CHECK(c10::cuda::current_device() == 1);
}

TEST_CASE("a graph over two GPUs is exact: one offloader moves its device's part, the other's stays",
          "[gpu][multi_gpu]") {
  const auto program = [](const at::Tensor& x) { return forward((x * 1.5).sin().exp().to(gpu(1))); };
  const at::Tensor x = leaf(gpu(0));
  const at::Tensor expected = grad({program(x)}, {x})[0];
  for (const c10::DeviceIndex index : {0, 1}) {
    Offloader offloader(everything_on(gpu(index)));
    const at::Tensor loss = guarded(offloader, program, x);
    CHECK(offloader.stats().offloaded.tensors > 0);
    CHECK(offloader.stats().kept_for(KeptReason::kOtherDevice).tensors > 0);
    CHECK(grad({loss}, {x})[0].equal(expected));
  }
}

}  // namespace ebb
