// CUDA graphs: what is saved while a graph is captured stays as it is.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "test/gpu/delays.h"

namespace ebb {
namespace {

using torch::autograd::grad;

const c10::Device kGpu(c10::kCUDA, 0);

Options moving() {
  Options options;
  options.device = kGpu;
  options.policy = offload_everything();
  options.stash_bytes = 1;
  return options;
}

at::Tensor forward(const at::Tensor& x) {
  at::Tensor y = x * 1.5;
  for (int i = 0; i < 4; ++i) {
    y = y.sin() * y.sigmoid();
  }
  return y.sum();
}

struct Replayed {
  at::Tensor input = at::linspace(-1, 1, 1 << 16, at::TensorOptions(kGpu)).requires_grad_();
  at::Tensor gradient;
  at::cuda::CUDAGraph graph;

  // With other values than were captured.
  at::Tensor replay() {
    {
      const at::NoGradGuard no_grad;
      input.mul_(0.5);
    }
    graph.replay();
    c10::cuda::device_synchronize();
    return gradient.clone();
  }

  at::Tensor plain() {
    const at::Tensor x = input.detach().clone().requires_grad_();
    return grad({forward(x)}, {x})[0];
  }
};

// On the stream that is current, whose work outside of any graph comes first.
void warm_up(Offloader& offloader, const at::Tensor& input) {
  const OffloadGuard guard(offloader);
  for (int i = 0; i < 3; ++i) {
    static_cast<void>(grad({forward(input)}, {input}));
  }
  c10::cuda::device_synchronize();
}

TEST_CASE("a step captured inside a guard, and beside training under it, is replayed exactly", "[gpu]") {
  Offloader offloader(moving());
  const c10::cuda::CUDAStreamGuard on_stream(test::other_stream());
  Replayed step;
  warm_up(offloader, step.input);
  {
    const OffloadGuard guard(offloader);
    // Saves of before, whose copies and ends come while the graph is captured.
    at::Tensor before = forward(step.input);
    step.graph.capture_begin();
    at::Tensor loss = forward(step.input);
    before.reset();
    step.gradient = grad({loss}, {step.input})[0];
    loss.reset();
    step.graph.capture_end();
  }
  CHECK(offloader.stats().kept_for(KeptReason::kCaptured).tensors > 0);
  for (int i = 0; i < 3; ++i) {
    CHECK(step.replay().equal(step.plain()));
    warm_up(offloader, step.input);
  }
}

TEST_CASE("a guard may lie inside of a capture", "[gpu]") {
  Offloader offloader(moving());
  const c10::cuda::CUDAStreamGuard on_stream(test::other_stream());
  Replayed step;
  warm_up(offloader, step.input);
  step.graph.capture_begin();
  {
    const OffloadGuard guard(offloader);
    step.gradient = grad({forward(step.input)}, {step.input})[0];
  }
  step.graph.capture_end();
  for (int i = 0; i < 3; ++i) {
    CHECK(step.replay().equal(step.plain()));
  }
}

TEST_CASE("a backward that is captured without its forward pass gets one clear error, and nothing is lost", "[gpu]") {
  Offloader offloader(moving());
  const c10::cuda::CUDAStreamGuard on_stream(test::other_stream());
  Replayed step;
  warm_up(offloader, step.input);
  at::Tensor loss;
  {
    const OffloadGuard guard(offloader);
    loss = forward(step.input);
  }
  offloader.drain();
  c10::cuda::device_synchronize();
  step.graph.capture_begin();
  CHECK_THROWS_WITH(grad({loss}, {step.input}, {}, /*retain_graph=*/true), Catch::Contains("CUDA graph"));
  step.graph.capture_end();
  CHECK(grad({loss}, {step.input})[0].equal(step.plain()));
}

}  // namespace
}  // namespace ebb
