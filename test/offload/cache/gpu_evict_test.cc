// A GPU that has no memory left, and budgets on one: what was kept makes room, and no step goes over its plan.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/checkpoint.h"
#include "offload/guard.h"
#include "offload/offloader.h"
#include "offload/parameters.h"
#include "policy/policies.h"
#include "test/offload/on_threads.h"

namespace ebb {
namespace {

using Catch::Contains;
using Tensors = std::vector<at::Tensor>;

const c10::Device kGpu(c10::kCUDA, 0);
constexpr std::int64_t kRows = 2048;
constexpr std::uint64_t kMatrix = kRows * kRows * sizeof(float);
constexpr int kLayers = 24;

std::uint64_t reserved_bytes() {
  const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(0);
  return static_cast<std::uint64_t>(
      stats.reserved_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
}

// While it lives, LibTorch may take so many bytes of the device.
class Capped {
 public:
  explicit Capped(std::uint64_t bytes) {
    std::size_t free = 0;
    std::size_t total = 0;
    cudaMemGetInfo(&free, &total);
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::setMemoryFraction(static_cast<double>(bytes) / static_cast<double>(total), 0);
  }
  ~Capped() {
    c10::cuda::CUDACachingAllocator::setMemoryFraction(1, 0);
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  Capped(const Capped&) = delete;
  Capped& operator=(const Capped&) = delete;
};

// While it lives, LibTorch's segments are expandable.
class Expandable {
 public:
  Expandable() {
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  }
  ~Expandable() {
    c10::CachingAllocator::setAllocatorSettings(was_ ? "expandable_segments:True" : "expandable_segments:False");
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  Expandable(const Expandable&) = delete;
  Expandable& operator=(const Expandable&) = delete;

 private:
  const bool was_ = c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
};

// What it saves is most of what it takes: all layers share a weight.
class Network {
 public:
  Network() {
    at::manual_seed(1);
    weight_ = at::randn({kRows, kRows}, kGpu).mul_(0.02).requires_grad_();
    input_ = at::randn({kRows, kRows}, kGpu);
  }

  // `halfway`: called in the middle of the forward pass.
  Tensors step(
      Offloader* offloader, const std::function<void()>& halfway = [] {}) const {
    std::optional<OffloadGuard> guard;
    if (offloader != nullptr) {
      guard.emplace(*offloader);
    }
    at::Tensor x = input_;
    for (int i = 0; i < kLayers; ++i) {
      x = at::tanh(at::mm(x, weight_));
      if (i == kLayers / 2) {
        halfway();
      }
    }
    return torch::autograd::grad({x.square().sum()}, {weight_});
  }

 private:
  at::Tensor weight_;
  at::Tensor input_;
};

void expect_equal(const Tensors& actual, const Tensors& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    INFO("gradient " << i);
    CHECK(actual[i].equal(expected[i]));
  }
}

// What LibTorch holds between steps: weights, and what other tests have left, such as workspaces of their streams.
std::uint64_t reserve_between_steps() {
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  return reserved_bytes();
}

// What a plain step takes, with what is there before.
std::uint64_t plain_reserve(const Network& network) {
  network.step(nullptr);
  static_cast<void>(reserve_between_steps());
  network.step(nullptr);
  return reserved_bytes();
}

Options keeping() {
  Options options;
  options.device = kGpu;
  options.policy = keep_everything();
  return options;
}

}  // namespace

TEST_CASE("a step that does not fit a GPU evicts what was kept, and has plain autograd's gradients", "[gpu]") {
  const Network network;
  const Tensors expected = network.step(nullptr);
  const std::uint64_t plain = plain_reserve(network);
  Offloader offloader(keeping());
  const Capped capped(plain - 8 * kMatrix);
  Options off = keeping();
  off.evict_when_out_of_memory = false;
  {
    Offloader without(off);
    // A request is served only where an offloader is: this one's step would be helped out by the other's eviction, if
    // that had anything.
    CHECK_THROWS_AS(network.step(&without), c10::OutOfMemoryError);
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
  for (int i = 0; i < 4; ++i) {
    expect_equal(network.step(&offloader), expected);
  }
  CHECK(offloader.stats().evicted.tensors > 0);
  CHECK(offloader.stats().fetched.tensors > 0);
  CHECK(offloader.stats().pool.now_bytes == 0);
}

TEST_CASE("where a GPU is full, managed tensors go home, and come back as they were", "[managed][gpu]") {
  constexpr std::size_t kTensors = 12;
  const auto fill = [] {
    std::vector<at::Tensor> room;
    for (std::size_t i = 0; i < kTensors; ++i) {
      room.push_back(at::empty({kRows, kRows}, kGpu));
    }
  };
  Parameters how;
  how.device_bytes = 2 * kTensors * kMatrix;
  for (const bool evict : {false, true}) {
    Options options = keeping();
    options.evict_when_out_of_memory = evict;
    Offloader offloader(options);
    at::manual_seed(1);
    Tensors tensors;
    Tensors expected;
    for (std::size_t i = 0; i < kTensors; ++i) {
      tensors.push_back(at::randn({kRows, kRows}, kGpu));
      expected.push_back(tensors.back().cpu().add_(1));
    }
    offloader.manage(tensors, how);
    for (const at::Tensor& tensor : tensors) {
      tensor.add_(1);
    }
    REQUIRE(offloader.stats().managed_on_device.now_bytes == kTensors * kMatrix);
    const Capped capped(reserve_between_steps() + 4 * kMatrix);
    if (!evict) {
      CHECK_THROWS_AS(fill(), c10::OutOfMemoryError);
      continue;
    }
    for (int i = 0; i < 3; ++i) {
      fill();
      for (std::size_t j = 0; j < kTensors; ++j) {
        CHECK(tensors[j].cpu().equal(expected[j]));
      }
    }
    CHECK(offloader.stats().managed_evicted.tensors > 0);
  }
}

TEST_CASE("a GPU full of managed tensors grants what it has granted before, however large", "[managed][gpu]") {
  constexpr std::size_t kTensors = 12;
  const auto request = [] { return at::empty({8, kRows, kRows}, kGpu); };
  Offloader offloader(keeping());
  Tensors tensors;
  Tensors expected;
  for (std::size_t i = 0; i < kTensors; ++i) {
    tensors.push_back(at::full({kRows, kRows}, static_cast<double>(i), kGpu));
    expected.push_back(tensors.back().cpu().add_(1));
  }
  Parameters how;
  how.device_bytes = 2 * kTensors * kMatrix;
  offloader.manage(tensors, how);
  request();  // nobody saves this
  for (const at::Tensor& tensor : tensors) {
    tensor.add_(1);
  }
  REQUIRE(offloader.stats().managed_on_device.now_bytes == kTensors * kMatrix);
  const Capped capped(reserve_between_steps() + kMatrix);
  CHECK_NOTHROW(request());
  CHECK(offloader.stats().managed_evicted.tensors > 0);
  for (std::size_t i = 0; i < kTensors; ++i) {
    CHECK(tensors[i].cpu().equal(expected[i]));
  }
}

TEST_CASE("room is made although holes in expandable segments have no whole pages", "[managed][gpu]") {
  constexpr std::size_t kTensors = 16;
  const Expandable expandable;
  Offloader offloader(keeping());
  Tensors tensors;
  for (std::size_t i = 0; i < kTensors; ++i) {
    tensors.push_back(at::full({3, kRows, kRows}, static_cast<double>(i), kGpu));
  }
  Parameters how;
  how.device_bytes = 6 * kTensors * kMatrix;
  offloader.manage(tensors, how);
  const auto request = [] { return at::empty({12, kRows, kRows}, kGpu); };
  request();
  offloader.evict(3 * kTensors * kMatrix);
  c10::cuda::CUDACachingAllocator::emptyCache();
  Tensors between;  // stay, and lie in the pages beside the managed tensors
  for (const at::Tensor& tensor : tensors) {
    tensor.add_(1);
    between.push_back(at::zeros({1, kRows, kRows / 4}, kGpu));
  }
  REQUIRE(offloader.stats().managed_on_device.now_bytes == 3 * kTensors * kMatrix);
  const Capped capped(reserve_between_steps() + kMatrix);
  CHECK_NOTHROW(request());
  CHECK(offloader.stats().managed_evicted.tensors > 0);
  for (std::size_t i = 0; i < kTensors; ++i) {
    CHECK(tensors[i].eq(static_cast<double>(i + 1)).all().item<bool>());
  }
}

TEST_CASE("without need nothing is evicted on a GPU, however often LibTorch asks the device", "[gpu]") {
  const Network network;
  Offloader offloader(keeping());
  for (int i = 0; i < 3; ++i) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    network.step(&offloader);
  }
  CHECK(offloader.stats().evicted.tensors == 0);
  CHECK(offloader.stats().kept_for(KeptReason::kPolicy).tensors > 0);
}

TEST_CASE("a request larger than all that was saved succeeds when the step is run again", "[gpu]") {
  const Network network;
  const Tensors expected = network.step(nullptr);
  const std::uint64_t plain = plain_reserve(network);
  constexpr std::uint64_t kRequest = 8 * kMatrix;
  Offloader offloader(keeping());
  const Capped capped(plain + kMatrix);
  const auto step = [&] {
    return network.step(&offloader, [] {
      static_cast<void>(
          at::empty({static_cast<std::int64_t>(kRequest)}, at::TensorOptions().device(kGpu).dtype(at::kByte)));
    });
  };
  // Halfway 13 matrices of some 30 are kept: the device has room for less than the request, and more than one matrix.
  const at::Tensor held_elsewhere = at::empty({10 * kRows, kRows}, kGpu);
  CHECK_THROWS_AS(step(), c10::OutOfMemoryError);
  CHECK(offloader.stats().evicted.tensors == 0);
  c10::cuda::CUDACachingAllocator::emptyCache();
  expect_equal(step(), expected);
  CHECK(offloader.stats().evicted.tensors > 0);
}

TEST_CASE("steps on several threads evict each other's storages on a GPU", "[gpu]") {
  const Network network;
  const Tensors expected = network.step(nullptr);
  const std::uint64_t plain = plain_reserve(network);
  const std::uint64_t between = reserve_between_steps();
  constexpr std::size_t kThreads = 3;
  Offloader offloader(keeping());
  std::vector<Tensors> found(kThreads);
  {
    const Capped capped(between + 2 * (plain - between));  // two steps at once
    on_threads(kThreads, [&](std::size_t thread) {
      for (int i = 0; i < 4; ++i) {
        try {
          found[thread] = network.step(&offloader);
        } catch (const c10::OutOfMemoryError&) {  // the others' gradients may need more than can be evicted
          c10::cuda::CUDACachingAllocator::emptyCache();
        }
      }
    });
  }
  CHECK(offloader.stats().evicted.tensors > 0);
  for (const Tensors& each : found) {
    if (!each.empty()) {
      expect_equal(each, expected);
    }
  }
}

TEST_CASE("every step that follows a plan stays within its budget on a GPU", "[gpu]") {
  const Network network;
  const Tensors expected = network.step(nullptr);
  auto* const allocator = c10::getDeviceAllocator(c10::kCUDA);
  const auto peak = [&] {
    const auto stats = allocator->getDeviceStats(0);
    return static_cast<std::uint64_t>(
        stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak);
  };
  allocator->resetPeakStats(0);
  network.step(nullptr);
  const std::uint64_t plain = peak();
  const int taken_away = GENERATE(4, 12, 18);  // matrices, of 24 that are saved
  Options options;
  options.device = kGpu;
  options.device_budget = DeviceBytes{plain - static_cast<std::uint64_t>(taken_away) * kMatrix};
  Offloader offloader(options);
  constexpr int kUntilPlanned = 2;
  for (int i = 0; i < 12; ++i) {
    CAPTURE(taken_away, i);
    allocator->resetPeakStats(0);
    expect_equal(network.step(&offloader), expected);
    const auto report = offloader.plan_report();
    if (i >= kUntilPlanned && !(report && report->actual)) {
      continue;  // a step that is recorded sets the peak back itself
    }
    if (i >= kUntilPlanned) {
      CHECK(peak() <= plain - static_cast<std::uint64_t>(taken_away) * kMatrix);
    }
  }
  const auto report = offloader.plan_report();
  REQUIRE(report);
  CHECK(report->fits);
  CHECK(report->predicted.offloaded_bytes + report->predicted.recomputed_bytes > 0);
  REQUIRE(report->actual);
  CHECK(report->actual->peak_bytes <= report->budget_bytes);
}

TEST_CASE("a budget that cannot be met on a GPU is an error that names the least that can be", "[gpu]") {
  const Network network;
  Options options;
  options.device = kGpu;
  options.device_budget = DeviceBytes{kMatrix};
  Offloader offloader(options);
  for (int i = 0; i < 2; ++i) {
    network.step(&offloader);
  }
  CHECK_THROWS_WITH(network.step(&offloader),
                    Contains("Options::device_budget cannot be met") && Contains("takes at least"));
}

TEST_CASE("checkpointed regions with dropout have plain autograd's gradients on a GPU, alone and under a guard",
          "[gpu]") {
  at::manual_seed(1);
  const at::Tensor weight = at::randn({512, 512}, kGpu).mul_(0.05).requires_grad_();
  const at::Tensor input = at::randn({512, 512}, kGpu).requires_grad_();
  const CheckpointedFunction layer = [&weight](const Tensors& x) -> Tensors {
    return {at::dropout(at::silu(at::mm(x[0], weight)), 0.3, /*train=*/true)};
  };
  const auto gradients = [&](bool checkpointed) {
    at::manual_seed(2);
    at::Tensor x = input;
    for (int i = 0; i < 3; ++i) {
      x = checkpointed ? checkpoint(layer, {x})[0] : layer({x})[0];
    }
    Tensors all = torch::autograd::grad({x.square().sum()}, {weight, input});
    all.push_back(at::rand({4}, kGpu));  // the random state afterwards
    return all;
  };
  const Tensors expected = gradients(false);
  expect_equal(gradients(true), expected);
  Options options;
  options.device = kGpu;
  options.policy = offload_everything();
  Offloader offloader(options);
  const OffloadGuard guard(offloader);
  expect_equal(gradients(true), expected);
  CHECK(offloader.stats().offloaded.tensors > 0);
}

}  // namespace ebb
