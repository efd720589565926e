// The waits inside a GPU's tier, which the check of order does not see, and the end of its host memory. Each case holds
// something up so that without the wait the wrong bytes are moved or read, or memory that is gone, every time.

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include "streams/base/host_completion.h"
#include "streams/gpu/pinned_tier.h"
#include "test/gpu/delays.h"

namespace ebb {
namespace {

constexpr std::int64_t kInts = 1 << 20;
constexpr std::size_t kBytes = kInts * sizeof(int);

at::Tensor full(int value) {
  return at::full({kInts}, value, at::TensorOptions().device(c10::kCUDA, 0).dtype(at::kInt));
}

void fill(const Block& block, int value) { std::fill_n(static_cast<int*>(block.data()), kInts, value); }

bool holds(const Block& block, int value) {
  const auto* const data = static_cast<const int*>(block.data());
  return std::all_of(data, data + kInts, [value](int each) { return each == value; });
}

After after(const Ticket& ticket) { return {WaitPoint::kCaller, ticket}; }

}  // namespace

TEST_CASE("a copy out waits for the kernels before the recorded point", "[gpu][gpu_ordering][pinned_tier]") {
  PinnedTier tier(PinnedTier::Config{});
  const std::optional<Block> block = tier.try_acquire(kBytes);
  at::Tensor source = full(1);
  tier.copy_out(*block, source.const_data_ptr(), after(tier.record(tier.current_stream())));
  c10::cuda::device_synchronize();
  test::spin();
  source.fill_(7);
  tier.copy_out(*block, source.const_data_ptr(), after(tier.record(tier.current_stream())));
  c10::cuda::device_synchronize();
  CHECK(holds(*block, 7));
}

TEST_CASE("a copy in waits for the copy out of the same block, however long that is held up",
          "[gpu][gpu_ordering][pinned_tier]") {
  PinnedTier tier(PinnedTier::Config{});
  test::LaneHold lanes(tier);
  const std::optional<Block> block = tier.try_acquire(kBytes);
  const at::Tensor source = full(7);
  at::Tensor target = full(0);
  c10::cuda::device_synchronize();
  lanes.hold_out();
  const Ticket out = tier.copy_out(*block, source.const_data_ptr(), after(tier.record(tier.current_stream())));
  tier.copy_in(target.mutable_data_ptr(), *block, after(out));
  c10::cuda::device_synchronize();
  CHECK(target.equal(source));
}

TEST_CASE("later kernels wait for a copy in, and the wait is counted as a stall", "[gpu][gpu_ordering][pinned_tier]") {
  PinnedTier tier(PinnedTier::Config{});
  test::LaneHold lanes(tier);
  const std::optional<Block> block = tier.try_acquire(kBytes);
  fill(*block, 7);
  at::Tensor target = full(0);
  static_cast<void>(target.min());  // CUDA loads a kernel when it is first used, and may wait for the device
  c10::cuda::device_synchronize();
  lanes.hold_in();
  const c10::Stream stream = tier.current_stream();
  const Ticket in = tier.copy_in(target.mutable_data_ptr(), *block, after(tier.record(stream)));
  tier.wait(WaitPoint::kCaller, stream, in);
  CHECK(target.min().item<int>() == 7);
  CHECK(tier.stall_stats().count == 1);
  CHECK(tier.stall_stats().total_ms > 0);
}

// A function of the host in a stream's order stands for a copy that nobody has a ticket of. A real one need not show
// that the wait is missing: CUDA may wait for the device by itself when memory is no longer page-locked, and it moves
// other memory before the call that asks for the copy returns.
TEST_CASE("a tier that ends waits for the device before its host memory goes", "[gpu][gpu_ordering][pinned_tier]") {
  struct Copy {
    const int* from;
    std::vector<int> to;
  };
  PinnedTier::Config config;
  config.pinned = GENERATE(true, false);
  auto tier = std::make_unique<PinnedTier>(config);
  std::optional<Block> block = tier->try_acquire(kBytes);
  fill(*block, 7);
  Copy copy{static_cast<const int*>(block->data()), std::vector<int>(kInts)};
  {
    const c10::cuda::CUDAStreamGuard other(test::other_stream());
    test::spin();
    const auto run = [](void* data) {
      auto& copy = *static_cast<Copy*>(data);
      std::copy_n(copy.from, kInts, copy.to.begin());
    };
    C10_CUDA_CHECK(cudaLaunchHostFunc(test::other_stream().stream(), run, &copy));
  }
  block.reset();
  tier.reset();
  c10::cuda::device_synchronize();
  CHECK(std::ranges::count(copy.to, 7) == kInts);
}

TEST_CASE("a tier that ends waits for a thread that still reads a block", "[gpu][gpu_ordering][pinned_tier]") {
  auto tier = std::make_unique<PinnedTier>(PinnedTier::Config{});
  std::optional<Block> block = tier->try_acquire(kBytes);
  fill(*block, 7);
  const auto user = std::make_shared<HostCompletion>();
  block->gate(WaitPoint::kCaller, user);
  std::vector<int> seen(kInts);
  std::jthread reader([&seen, user, from = static_cast<const int*>(block->data())] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::copy_n(from, kInts, seen.begin());
    user->finish(nullptr);
  });
  block.reset();
  tier.reset();
  reader.join();
  CHECK(std::ranges::count(seen, 7) == kInts);
}

}  // namespace ebb
