// Custom functions that work on a side stream and tell LibTorch so by record_stream: memory that ebb handed them must
// not be handed out again before that stream is done with it.

#include <limits>
#include <memory>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "offload/guard.h"
#include "offload/offloader.h"
#include "policy/policies.h"
#include "test/gpu/delays.h"

namespace ebb {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

const c10::Device kGpu(c10::kCUDA, 0);

// The square of its input. Backward computes on a side stream, which has other work to do first, and records that
// stream for what it reads there; nothing else makes the memory wait.
struct SquareOnSideStream : Function<SquareOnSideStream> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto compute = c10::cuda::getCurrentCUDAStream();
    const auto side = test::other_stream();
    at::cuda::CUDAEvent ready;
    ready.record(compute);
    ready.block(side);
    at::cuda::CUDAEvent done;
    at::Tensor result;
    {
      const c10::cuda::CUDAStreamGuard on_side(side);
      test::spin();
      const at::Tensor x = context->get_saved_variables()[0];
      result = read(x, compute, side, gradients[0]);
      done.record(side);
    }
    done.block(compute);
    return {result};
  }

 private:
  static at::Tensor read(const at::Tensor& x, c10::cuda::CUDAStream compute, c10::cuda::CUDAStream side,
                         const at::Tensor& gradient) {
    x.record_stream(compute);
    gradient.record_stream(side);
    at::Tensor result = gradient * x * 2;
    result.record_stream(compute);
    return result;
  }
};

// The same, but the saved tensor is asked for on the compute stream, read on the side stream, and let go of at once.
struct HandsToSideStream : Function<HandsToSideStream> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::Tensor* sum) {
    context->save_for_backward({x});
    context->saved_data["sum"] = reinterpret_cast<std::int64_t>(sum);
    return x * 2;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& sum = *reinterpret_cast<at::Tensor*>(context->saved_data["sum"].toInt());
    const auto side = test::other_stream();
    at::Tensor x = context->get_saved_variables()[0];
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    ready.block(side);
    x.record_stream(side);
    {
      const c10::cuda::CUDAStreamGuard on_side(side);
      test::spin();
      sum = x.sum();
    }
    return {gradients[0] * 2, at::Tensor()};
  }
};

at::Tensor input() { return at::linspace(-1, 1, 1 << 20, at::TensorOptions(kGpu)).requires_grad_(); }

Options moving() {
  Options options;
  options.device = kGpu;
  options.policy = offload_everything();
  options.stash_bytes = 1;
  return options;
}

// Takes memory of the size that has just been let go of, and overwrites it.
void reuse_memory(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    at::full({1 << 20}, std::numeric_limits<float>::quiet_NaN(), at::TensorOptions(kGpu));
  }
}

TEST_CASE("memory that was fetched or recomputed is not reused before a recorded stream is done with it", "[gpu]") {
  const bool computed = GENERATE(false, true);
  CAPTURE(computed);
  Options options = moving();
  if (computed) {
    options.policy = recompute();
  }
  Offloader offloader(options);
  test::start_afresh();
  at::Tensor sum;
  at::Tensor expected;
  for (int step = 0; step < 2; ++step) {  // the first one proves the recipe
    at::Tensor loss;
    const at::Tensor leaf = input();
    {
      const OffloadGuard guard(offloader);
      const at::Tensor x = computed ? at::silu(leaf * 1.5) : leaf * 1.5;
      expected = x.detach().sum();
      loss = HandsToSideStream::apply(x, &sum).sum();
    }
    offloader.drain();
    loss.backward();
    reuse_memory(8);
  }
  c10::cuda::device_synchronize();
  CHECK((computed ? offloader.stats().recomputed.tensors : offloader.stats().fetched.tensors) >= 1);
  CHECK(sum.item<float>() == expected.item<float>());
}

TEST_CASE("a backward on a side stream that records it has plain autograd's gradient", "[gpu]") {
  const auto gradient = [](Offloader* offloader) {
    const at::Tensor leaf = input();
    at::Tensor loss;
    {
      const auto guard = offloader == nullptr ? nullptr : std::make_unique<OffloadGuard>(*offloader);
      at::Tensor x = leaf * 1.5;
      for (int i = 0; i < 4; ++i) {
        x = SquareOnSideStream::apply(x).sin();
      }
      loss = x.sum();
    }
    loss.backward();
    reuse_memory(4);
    c10::cuda::device_synchronize();
    return leaf.grad();
  };
  const at::Tensor expected = gradient(nullptr);
  Offloader offloader(moving());
  for (int step = 0; step < 4; ++step) {
    CHECK(gradient(&offloader).equal(expected));
  }
}

// What the side stream has saved goes back to the compute stream's pool, which is right, for it was recorded: the check
// of the order of all accesses must say so, too.
TEST_CASE("memory that a side stream saved, and that is recorded there, is let go of by its own stream", "[gpu]") {
  Offloader offloader(moving());
  for (int step = 0; step < 4; ++step) {
    const at::Tensor leaf = input();
    at::Tensor x = leaf * 1.5;
    const auto side = test::other_stream();
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    ready.block(side);
    at::cuda::CUDAEvent done;
    at::Tensor y;
    {
      const c10::cuda::CUDAStreamGuard on_side(side);
      const OffloadGuard guard(offloader);
      test::spin();
      y = x.sin();
      x.record_stream(side);
      y.record_stream(c10::cuda::getDefaultCUDAStream());
      done.record(side);
    }
    x.reset();
    done.block(c10::cuda::getCurrentCUDAStream());
    y.sum().backward();
    CHECK(leaf.grad().equal((leaf.detach() * 1.5).cos() * 1.5));
  }
}

}  // namespace
}  // namespace ebb
