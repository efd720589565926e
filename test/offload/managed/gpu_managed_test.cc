// Parameters on a GPU whose bytes live in pinned host memory, beside the same parameters that stay.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <catch2/catch.hpp>
#include <torch/csrc/autograd/autograd.h>

#include "offload/base/managed_key.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/optimizer.h"
#include "offload/parameters.h"
#include "policy/policies.h"
#include "test/gpu/delays.h"
#include "test/offload/managed/managed_helpers.h"
#include "test/random/device_bytes.h"

namespace ebb {
namespace {

using test::check_equal;
using test::within;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr std::int64_t kWidth = 1024;
constexpr std::uint64_t kBytes = kWidth * kWidth * sizeof(float);
constexpr std::size_t kLayers = 8;
using Tensors = std::vector<at::Tensor>;

Options gpu_options() {
  Options options;
  options.device = kGpu;
  options.policy = minimum_size(4096);
  return options;
}

Tensors make_weights() {
  at::manual_seed(1);
  Tensors weights;
  for (std::size_t i = 0; i < kLayers; ++i) {
    weights.push_back((at::randn({kWidth, kWidth}, kGpu) * 0.02).requires_grad_());
  }
  return weights;
}

at::Tensor forward(const Tensors& weights, at::Tensor hidden) {
  for (const at::Tensor& weight : weights) {
    hidden = at::silu(at::mm(hidden, weight)) + hidden;
  }
  return at::mm(hidden, weights.front()).square().mean();  // tied
}

// Returns the loss.
at::Tensor train_step(const Tensors& weights, Offloader* offloader, int step) {
  const at::Tensor input = at::arange(64 * kWidth, at::TensorOptions(kGpu).dtype(at::kFloat)).view({64, -1}).sin();
  at::Tensor loss;
  {
    std::optional<OffloadGuard> guard;
    if (offloader != nullptr) {
      guard.emplace(*offloader);
    }
    loss = forward(weights, input + step);
  }
  torch::autograd::backward({loss});
  const at::NoGradGuard no_grad;
  for (const at::Tensor& weight : weights) {
    weight.sub_(weight.grad() * 0.01);
    weight.mutable_grad().reset();
  }
  return loss.detach();
}

// The most that LibTorch's allocator has given out in a step.
std::uint64_t peak_of_step(const Tensors& weights, Offloader* offloader) {
  auto* const allocator = c10::getDeviceAllocator(c10::kCUDA);
  allocator->resetPeakStats(kGpu.index());
  static_cast<void>(train_step(weights, offloader, 0));
  return static_cast<std::uint64_t>(allocator->getDeviceStats(kGpu.index()).allocated_bytes[0].peak);
}

// `delayed`: the device starts each step when the host may long be through with it.
Tensors train(const Tensors& weights, Offloader* offloader, bool delayed = false) {
  Tensors seen;
  for (int step = 0; step < 4; ++step) {
    if (delayed) {
      test::spin();
    }
    const at::Tensor loss = train_step(weights, offloader, step);
    seen.push_back(loss);
    CHECK(loss.isfinite().item<bool>());
  }
  for (const at::Tensor& weight : weights) {
    seen.push_back(weight.detach().clone());
  }
  return seen;
}

TEST_CASE("managed parameters on a GPU train to the same bits", "[managed][gpu]") {
  const Tensors expected = train(make_weights(), nullptr);
  check_equal(expected, train(make_weights(), nullptr));  // or nothing can be said
  const std::uint64_t bound = GENERATE(0U, 3 * kBytes, 100 * kBytes);
  const bool saves_move = GENERATE(false, true);
  const bool delayed = GENERATE(false, true);
  Options options = gpu_options();
  options.host_memory = GENERATE(HostMemory::kPinned, HostMemory::kPageable);
  INFO("bound " << bound << ", saves move: " << saves_move << ", delayed: " << delayed);
  Offloader offloader(options);
  const Tensors weights = make_weights();
  offloader.manage(weights, within(bound));
  check_equal(expected, train(weights, saves_move ? &offloader : nullptr, delayed));
}

TEST_CASE("managed parameters take no more of a GPU than their bound", "[managed][gpu]") {
  const std::uint64_t before = graphs::settled_device_bytes(kGpu);
  Offloader offloader(gpu_options());
  const Tensors weights = make_weights();
  offloader.manage(weights, within(2 * kBytes));
  CHECK(graphs::settled_device_bytes(kGpu) <= before + 2 * kBytes);
  const at::Tensor copy = weights[0].detach().clone();
  CHECK(at::equal(weights[0], copy));
  CHECK(weights[0].is_leaf());
}

TEST_CASE("a plan bounds managed parameters on a GPU, and every step has the same bits", "[managed][gpu]") {
  constexpr int kSteps = 16;  // recorded, planned, and checked
  const auto losses = [](const Tensors& weights, Offloader* offloader) {
    Tensors seen;
    for (int step = 0; step < kSteps; ++step) {
      seen.push_back(train_step(weights, offloader, step % 4));
      CHECK(seen.back().isfinite().item<bool>());
      const at::NoGradGuard no_grad;
      for (const at::Tensor& weight : weights) {
        weight.mul_(0.9);  // or training diverges
      }
    }
    return seen;
  };
  Tensors expected;
  std::uint64_t plain_peak = 0;
  {
    const Tensors weights = make_weights();
    expected = losses(weights, nullptr);
    plain_peak = peak_of_step(weights, nullptr);
  }
  const std::uint64_t budget = plain_peak + GENERATE(0U, 1U) * 100 * kBytes - GENERATE(0U, 4U, 6U) * kBytes;
  INFO("budget " << budget << ", plain " << plain_peak);
  Options options = gpu_options();
  options.policy = nullptr;
  options.device_budget = DeviceBytes{budget};
  options.planned_minimum_bytes = 4096;
  Offloader offloader(options);
  Parameters how;
  how.minimum_bytes = 0;
  const Tensors weights = make_weights();
  offloader.manage(weights, how);
  check_equal(expected, losses(weights, &offloader));
  const std::optional<PlanReport> report = offloader.plan_report();
  REQUIRE(report);
  REQUIRE(report->managed);
  CHECK(report->fits);
  CHECK(offloader.stats().managed_on_device.capacity_bytes == report->managed->device_bytes);
  CHECK(peak_of_step(weights, &offloader) <= budget);
}

TEST_CASE("parameters in CPU memory move to the GPU one by one, with their gradients", "[managed][gpu]") {
  const std::uint64_t before = graphs::settled_device_bytes(kGpu);
  Offloader offloader(gpu_options());
  Tensors weights;
  for (int i = 0; i < 8; ++i) {
    weights.push_back(at::full({kWidth, kWidth}, 1.0 * i).requires_grad_());
    weights.back().mutable_grad() = at::full({kWidth, kWidth}, -1.0 * i);
  }
  const at::Tensor other_name = weights[3];
  Parameters how = within(2 * kBytes);
  how.gradients = false;
  offloader.manage(weights, how);
  CHECK(other_name.is_cuda());
  for (int i = 0; i < 8; ++i) {
    CHECK(weights[i].is_leaf());
    CHECK(at::equal(weights[i], at::full({kWidth, kWidth}, 1.0 * i, kGpu)));
    CHECK(at::equal(weights[i].grad(), at::full({kWidth, kWidth}, -1.0 * i, kGpu)));
    weights[i].mutable_grad() = at::Tensor();
  }
  CHECK(graphs::settled_device_bytes(kGpu) <= before + 2 * kBytes);
}

TEST_CASE("what is expected next is fetched before its use, however far the host could be ahead", "[managed][gpu]") {
  Offloader offloader(gpu_options());
  const Tensors weights = make_weights();
  offloader.manage(weights, within(6 * kBytes));
  const at::NoGradGuard no_grad;
  std::uint64_t late_while_learning = 0;
  for (int round = 0; round < 6; ++round) {
    if (round == 3) {
      late_while_learning = offloader.stats().managed_fetched_late.tensors;
    }
    test::spin();
    for (const at::Tensor& weight : weights) {
      weight.add_(1);
    }
  }
  CHECK(offloader.stats().managed_fetched_late.tensors == late_while_learning);
  CHECK(offloader.stats().managed_prefetched.tensors > 0);
}

TEST_CASE("an update is seen on every stream, whenever it is made, and on either processor", "[managed][gpu]") {
  const auto update_and_use = [](UpdateIn update_in, UpdateOn update_on) {
    Offloader offloader(gpu_options());
    const Tensors weights = make_weights();
    offloader.manage(weights, within(0));
    AdamW optimizer(weights, torch::optim::AdamWOptions(0.1), update_in, update_on);
    const at::Tensor input = at::ones({64, kWidth}, kGpu);
    Tensors found;
    for (int step = 0; step < 3; ++step) {
      test::spin();  // gradients are late
      torch::autograd::backward({forward(weights, input)});
      test::spin();  // the update is late
      optimizer.step();
      optimizer.zero_grad();
      at::cuda::CUDAEvent stepped;
      stepped.record();
      stepped.block(test::other_stream());
      const at::NoGradGuard no_grad;
      const at::Tensor here = weights[0] * 2;
      const c10::cuda::CUDAStreamGuard stream(test::other_stream());
      for (const at::Tensor& weight : weights) {
        found.push_back(weight * 2);
      }
      c10::cuda::device_synchronize();
      CHECK(at::equal(here, found[found.size() - kLayers]));
    }
    return found;
  };
  const UpdateOn update_on = GENERATE(UpdateOn::kDevice, UpdateOn::kCpu);
  const Tensors expected = update_and_use(UpdateIn::kStep, update_on);
  check_equal(expected, update_and_use(UpdateIn::kNextUse, update_on));
  check_equal(expected, update_and_use(UpdateIn::kBackward, update_on));
}

TEST_CASE("an update at the next use runs on the stream of its step", "[managed][gpu]") {
  Offloader offloader(gpu_options());
  const Tensors weights = make_weights();
  offloader.manage(weights, within(100 * kBytes));
  AdamW optimizer(weights, torch::optim::AdamWOptions(0.1), UpdateIn::kNextUse);
  const at::Tensor input = at::ones({64, kWidth}, kGpu);
  for (int step = 0; step < 2; ++step) {
    torch::autograd::backward({forward(weights, input)});
    optimizer.step();
    optimizer.zero_grad();
  }
  const at::NoGradGuard no_grad;
  Tensors late;
  {
    const c10::cuda::CUDAStreamGuard stream(test::other_stream());
    test::spin();  // what runs on this stream comes later than what the default stream does below
    for (const at::Tensor& weight : weights) {
      late.push_back(weight * 2);
    }
  }
  Tensors now;
  for (const at::Tensor& weight : weights) {
    now.push_back(weight * 2);
  }
  c10::cuda::device_synchronize();
  check_equal(now, late);
}

TEST_CASE("a managed parameter that two streams use is right on both", "[managed][gpu]") {
  Offloader offloader(gpu_options());
  const Tensors plain = make_weights();
  const Tensors weights = make_weights();
  offloader.manage(weights, within(GENERATE(0U, 2 * kBytes)));
  const at::Tensor input = at::randn({kWidth, kWidth}, kGpu);
  c10::cuda::device_synchronize();
  const at::NoGradGuard no_grad;
  for (int round = 0; round < 3; ++round) {
    Tensors found;
    for (std::size_t i = 0; i < kLayers; ++i) {
      {
        // The other stream is late: what leaves next must wait for this use.
        const c10::cuda::CUDAStreamGuard stream(test::other_stream());
        test::spin();
        found.push_back(at::mm(input, weights[i]));
      }
      found.push_back(at::mm(weights[i], input));
    }
    test::start_afresh();
    for (std::size_t i = 0; i < kLayers; ++i) {
      CHECK(at::equal(found[2 * i], at::mm(input, plain[i])));
      CHECK(at::equal(found[2 * i + 1], at::mm(plain[i], input)));
    }
  }
}

TEST_CASE("a gradient goes home behind the stream that it became whole on", "[managed][gpu]") {
  at::manual_seed(1);
  const at::Tensor early = at::randn({kWidth, kWidth}, kGpu).requires_grad_();
  at::Tensor late;
  at::Tensor late_result;
  const auto forward = [&] {
    {
      const c10::cuda::CUDAStreamGuard stream(test::other_stream());  // where `late` accumulates, then
      late_result = late * 2;  // backward does not take `late`, whose copy in would have this stream wait
    }
    c10::cuda::device_synchronize();
    return (early * late_result).sum();
  };
  late = at::randn({kWidth, kWidth}, kGpu).requires_grad_();
  c10::cuda::device_synchronize();
  static_cast<void>(
      early.register_hook([](const at::Tensor&) { test::spin(); }));  // the addition to its gradient is late
  const auto gradients_of_two_passes = [&] {
    early.mutable_grad() = at::ones_like(early.detach());
    c10::cuda::device_synchronize();
    torch::autograd::backward({forward()});
    Tensors found{early.grad().clone(), late.grad().clone()};
    early.mutable_grad().reset();
    late.mutable_grad().reset();
    return found;
  };
  const Tensors expected = gradients_of_two_passes();
  Offloader offloader(gpu_options());
  offloader.manage({early, late}, within(0));
  check_equal(expected, gradients_of_two_passes());
}

TEST_CASE("writes on another stream come home", "[managed][gpu]") {
  Offloader offloader(gpu_options());
  const Tensors weights = make_weights();
  offloader.manage(weights, within(0));
  const at::NoGradGuard no_grad;
  c10::cuda::device_synchronize();
  {
    const c10::cuda::CUDAStreamGuard stream(test::other_stream());
    test::spin();
    weights[0].fill_(3);
    static_cast<void>(weights[1].sum());  // the first goes home
  }
  CHECK(at::equal(weights[0], at::full_like(weights[0], 3)));
  test::start_afresh();
}

}  // namespace
}  // namespace ebb
