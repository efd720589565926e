#include <vector>

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include "streams/gpu/pinned_tier.h"
#include "test/checked/fault_plan.h"
#include "test/gpu/delays.h"

namespace ebb {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

PinnedTier::Config config(bool pinned = true, bool overlapped = true) {
  PinnedTier::Config config;
  config.device = kGpu;
  config.pinned = pinned;
  config.overlapped = overlapped;
  return config;
}

at::Tensor random_bytes(std::int64_t bytes) {
  return at::randint(0, 256, {bytes}, at::TensorOptions().device(kGpu).dtype(at::kByte));
}

After after(const Ticket& ticket) { return {WaitPoint::kCaller, ticket}; }

}  // namespace

TEST_CASE("bytes come back from host memory as they left", "[gpu][pinned_tier]") {
  const std::int64_t bytes = GENERATE(1, 511, 4096, 4097, (1 << 20) + 3, 64 << 20);
  const bool pinned = GENERATE(true, false);
  const bool overlapped = GENERATE(true, false);
  PinnedTier tier(config(pinned, overlapped));
  const at::Tensor source = random_bytes(bytes);
  at::Tensor target = at::zeros_like(source);
  const c10::Stream stream = tier.current_stream();
  std::optional<Block> block = tier.try_acquire(bytes);
  REQUIRE(block);
  const Ticket out = tier.copy_out(*block, source.const_data_ptr(), after(tier.record(stream)));
  const std::vector<Ticket> before_in{out, tier.record(stream)};
  const Ticket in = tier.copy_in(target.mutable_data_ptr(), *block, {WaitPoint::kCaller, before_in});
  tier.wait(WaitPoint::kCaller, stream, in);
  CHECK(target.equal(source));
}

TEST_CASE("a ticket that is not done leaves no CUDA error behind", "[gpu][pinned_tier]") {
  PinnedTier tier(config());
  test::spin();
  const Ticket busy = tier.record(tier.current_stream());
  CHECK_FALSE(busy->done());
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  busy->synchronize();
  CHECK(busy->done());
}

TEST_CASE("to ask a ticket while another stream is captured gets the truth and leaves the capture alone",
          "[gpu][pinned_tier]") {
  PinnedTier tier(config());
  const c10::cuda::CUDAStream captured = test::other_stream();
  test::spin();
  const Ticket busy = tier.record(tier.current_stream());
  REQUIRE(cudaStreamBeginCapture(captured.stream(), cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK_FALSE(busy->done());
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(captured.stream(), &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  busy->synchronize();
  CHECK(busy->done());
}

TEST_CASE("after a large block was refused page-locked memory a small one still gets some", "[gpu][pinned_tier]") {
  PinnedTier tier(config());
  {
    const PlannedFault fault(FaultPoint::kPinnedAllocation, 2, FaultPlan::Extent::kOnce);  // 1 maps, 2 registers
    const std::optional<Block> large = tier.try_acquire(std::size_t{33} << 20);
    CHECK(FaultPlan::failures(FaultPoint::kPinnedAllocation) == 1);
  }
  CHECK(tier.try_acquire(1 << 20));
}

TEST_CASE("host memory is page-locked only if asked, and slabs hold exact sizes", "[gpu][pinned_tier]") {
  const bool pinned = GENERATE(true, false);
  PinnedTier tier(config(pinned));
  constexpr std::size_t kBytes = (std::size_t{33} << 20) + 4096;  // a power of two would make it 64 MiB
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) {
    std::optional<Block> block = tier.try_acquire(kBytes);
    REQUIRE(block);
    blocks.push_back(*std::move(block));
  }
  cudaPointerAttributes attributes{};
  REQUIRE(cudaPointerGetAttributes(&attributes, blocks.front().data()) == cudaSuccess);
  CHECK(attributes.type == (pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered));
  CHECK(tier.pool_stats().capacity_bytes <= 9 * kBytes);
}

TEST_CASE("a tier with a capacity leaves empty-handed who asks for more", "[gpu][pinned_tier]") {
  PinnedTier::Config bounded = config();
  bounded.capacity_bytes = 1 << 20;
  PinnedTier tier(bounded);
  const std::optional<Block> fits = tier.try_acquire(1 << 20);
  CHECK(fits);
  CHECK_FALSE(tier.try_acquire(1));
}

TEST_CASE("a tier serves its own device whichever is current", "[gpu][multi_gpu][pinned_tier]") {
  PinnedTier::Config second = config();
  second.device = c10::Device(c10::kCUDA, 1);
  PinnedTier tier(second);
  const c10::cuda::CUDAGuard current(0);
  const at::Tensor source = random_bytes(1 << 20).to(second.device);
  std::optional<Block> block = tier.try_acquire(source.nbytes());
  const c10::Stream stream = tier.current_stream();
  CHECK(stream.device() == second.device);
  const Ticket out = tier.copy_out(*block, source.const_data_ptr(), after(tier.record(stream)));
  c10::DataPtr data = tier.allocate(source.nbytes());
  CHECK(data.device() == second.device);
  const std::vector<Ticket> before_in{out, tier.record(stream)};
  tier.wait(WaitPoint::kCaller, stream, tier.copy_in(data.get(), *block, {WaitPoint::kCaller, before_in}));
  c10::cuda::device_synchronize();
  const Ticket done = tier.record(stream);
  done->synchronize();
  CHECK(c10::cuda::current_device() == 0);
}

}  // namespace ebb
