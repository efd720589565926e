// Small copies that are queued together: whoever waits for one of them gets it, and its error.

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <catch2/catch.hpp>

#include "streams/gpu/copy_batch.h"
#include "streams/gpu/pinned_tier.h"
#include "test/checked/fault_plan.h"
#include "test/gpu/delays.h"

namespace ebb {
namespace {

constexpr std::int64_t kSmall = 64 << 10;
constexpr std::int64_t kLarge = 1 << 20;

at::Tensor random_bytes(std::int64_t bytes) {
  return at::randint(0, 256, {bytes}, at::TensorOptions().device(c10::kCUDA, 0).dtype(at::kByte));
}

// Bytes on the GPU with a block for them.
struct Item {
  Item(PinnedTier& tier, std::int64_t bytes)
      : source(random_bytes(bytes)), target(at::zeros_like(source)), block(tier.try_acquire(bytes).value()) {}

  Ticket copy_out(PinnedTier& tier) {
    return tier.copy_out(block, source.const_data_ptr(), {WaitPoint::kCaller, tier.current_stream()});
  }

  Ticket copy_in(PinnedTier& tier, const Ticket& out) {
    After after(WaitPoint::kCaller, tier.current_stream());
    after.add(WaitPoint::kCaller, out);
    return tier.copy_in(target.mutable_data_ptr(), block, after);
  }

  at::Tensor source;
  at::Tensor target;
  Block block;
};

std::vector<Item> items(PinnedTier& tier, const std::vector<std::int64_t>& sizes) {
  std::vector<Item> items;
  for (const std::int64_t bytes : sizes) {
    items.emplace_back(tier, bytes);
  }
  return items;
}

}  // namespace

TEST_CASE("small copies come back as they left, in whatever order they are waited for", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < 300; ++i) {
    sizes.push_back(i % 50 == 49 ? kLarge + i : 1 + i * 900);
  }
  std::vector<Item> all = items(tier, sizes);
  std::vector<Ticket> out;
  for (Item& item : all) {
    out.push_back(item.copy_out(tier));
  }
  const bool reversed = GENERATE(false, true);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t at = reversed ? all.size() - 1 - i : i * 7 % all.size();
    tier.wait(WaitPoint::kCaller, tier.current_stream(), all[at].copy_in(tier, out[at]));
    CHECK(all[at].target.equal(all[at].source));
  }
}

TEST_CASE("a small copy is queued when its ticket is waited for, or when a large one comes", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<Item> all = items(tier, {kSmall, kSmall, kLarge});
  const Ticket first = all[0].copy_out(tier);
  c10::cuda::device_synchronize();
  CHECK_FALSE(first->done());
  SECTION("waited for by a stream") {
    tier.wait(WaitPoint::kCaller, tier.current_stream(), first);
    c10::cuda::device_synchronize();
    CHECK(first->done());
  }
  SECTION("waited for by a copy of the other lane") {
    const Ticket in = all[0].copy_in(tier, first);
    CHECK_FALSE(in->done());
    in->synchronize();
    CHECK(first->done());
    CHECK(all[0].target.equal(all[0].source));
  }
  SECTION("waited for by the host") {
    first->synchronize();
    CHECK(first->done());
  }
  SECTION("a large copy") {
    const Ticket second = all[1].copy_out(tier);
    CHECK(second == first);
    all[2].copy_out(tier)->synchronize();
    CHECK(first->done());
  }
  SECTION("the batch is full") {
    std::vector<Item> more = items(tier, std::vector<std::int64_t>(kLarge / kSmall - 1, kSmall));
    for (Item& item : more) {
      CHECK(item.copy_out(tier) == first);
    }
    c10::cuda::device_synchronize();
    CHECK(first->done());
    const Ticket next = all[1].copy_out(tier);
    CHECK(next != first);
    next->synchronize();
  }
  first->synchronize();
}

TEST_CASE("bytes of a batch that go to somebody else are written after it", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<Item> all = items(tier, {kSmall, kSmall});
  const Ticket first = all[0].copy_out(tier);
  After after(WaitPoint::kCaller, tier.current_stream());
  after.add(WaitPoint::kCaller, first);
  const Ticket second = tier.copy_out(all[0].block, all[1].source.const_data_ptr(), after);
  CHECK(second != first);
  const Ticket in = all[0].copy_in(tier, second);
  in->synchronize();
  CHECK(all[0].target.equal(all[1].source));
}

TEST_CASE("a batch starts behind the kernels that its copies were asked for behind", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  Item item(tier, kSmall);
  SECTION("out") {
    item.copy_out(tier)->synchronize();
    test::spin();
    item.source.fill_(7);
    const Ticket out = item.copy_out(tier);
    item.copy_in(tier, out)->synchronize();
    CHECK(item.target.eq(7).all().item<bool>());
  }
  SECTION("in: a late kernel still reads the memory") {
    const Ticket out = item.copy_out(tier);
    item.target.fill_(9);
    at::Tensor read = at::zeros_like(item.target);
    test::spin();
    read.copy_(item.target);
    item.copy_in(tier, out)->synchronize();
    CHECK(read.eq(9).all().item<bool>());
    CHECK(item.target.equal(item.source));
  }
}

TEST_CASE("a batch starts behind the copies of the other lane, however late these are", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  test::LaneHold lanes(tier);
  Item item(tier, kSmall);
  Item other(tier, kSmall);
  item.copy_out(tier)->synchronize();
  other.copy_out(tier)->synchronize();
  SECTION("in after out") {
    item.source.fill_(7);
    c10::cuda::device_synchronize();
    lanes.hold_out();
    item.copy_in(tier, item.copy_out(tier))->synchronize();
    CHECK(item.target.eq(7).all().item<bool>());
  }
  SECTION("out after in: the block goes to somebody else") {
    const at::Tensor before = item.source.clone();
    c10::cuda::device_synchronize();
    lanes.hold_in();
    const Ticket in = item.copy_in(tier, nullptr);
    After after(WaitPoint::kCaller, tier.current_stream());
    after.add(WaitPoint::kCaller, in);
    tier.copy_out(item.block, other.source.const_data_ptr(), after)->synchronize();
    in->synchronize();
    CHECK(item.target.equal(before));
  }
}

TEST_CASE("a flush queues what has been gathered, and a copy for another stream does", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  Item item(tier, kSmall);
  Item other(tier, kSmall);
  const Ticket first = item.copy_out(tier);
  Ticket second;
  SECTION("a flush") { tier.flush(); }
  SECTION("another stream") {
    const c10::cuda::CUDAStreamGuard guard(test::other_stream());
    second = other.copy_out(tier);
    CHECK(second != first);
  }
  c10::cuda::device_synchronize();
  CHECK(first->done());
  if (second != nullptr) {
    second->synchronize();
  }
}

TEST_CASE("a batch that CUDA refuses is copied one by one", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<Item> all = items(tier, {kSmall, kSmall});
  const PlannedFault fault(FaultPoint::kCopy, 1, FaultPlan::Extent::kOnce);
  const Ticket first = all[0].copy_out(tier);
  const Ticket second = all[1].copy_out(tier);
  second->synchronize();
  CHECK(FaultPlan::failures(FaultPoint::kCopy) == 1);
  for (Item& item : all) {
    item.copy_in(tier, first)->synchronize();
    CHECK(item.target.equal(item.source));
  }
}

TEST_CASE("copies that cannot be queued fail all who wait for their bytes, and no copy after them",
          "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<Item> all = items(tier, {kSmall, kSmall, kSmall});
  const Ticket first = all[0].copy_out(tier);
  const Ticket second = all[1].copy_out(tier);
  CHECK_FALSE(first->done());
  {
    const PlannedFault fault(FaultPoint::kCopy, 1, FaultPlan::Extent::kFromThenOn);
    CHECK_THROWS_AS(first->synchronize(), c10::Error);
  }
  CHECK_THROWS_AS(second->synchronize(), c10::Error);
  CHECK(second->done());
  CHECK_THROWS_AS(all[0].copy_in(tier, first), c10::Error);
  CHECK_THROWS_AS(tier.wait(WaitPoint::kCaller, tier.current_stream(), second), c10::Error);
  After after(WaitPoint::kCaller, tier.current_stream());
  after.add(WaitPoint::kCaller, first);  // of the block's earlier owner, say, which has failed
  const Ticket third = tier.copy_out(all[2].block, all[2].source.const_data_ptr(), after);
  all[2].copy_in(tier, third)->synchronize();
  CHECK(all[2].target.equal(all[2].source));
}

TEST_CASE("a batch without an event has waited for its copies", "[gpu][copy_batch]") {
  PinnedTier tier(PinnedTier::Config{});
  std::vector<Item> all = items(tier, {kSmall, kSmall});
  const Ticket first = all[0].copy_out(tier);
  const Ticket second = all[1].copy_out(tier);
  {
    const PlannedFault fault(FaultPoint::kEventCreation, 1, FaultPlan::Extent::kOnce);
    first->synchronize();
    REQUIRE(FaultPlan::failures(FaultPoint::kEventCreation) == 1);
  }
  CHECK(second->done());
  all[1].copy_in(tier, second)->synchronize();
  CHECK(all[1].target.equal(all[1].source));
}

TEST_CASE("pageable memory and the compute stream have no batches", "[gpu][copy_batch]") {
  PinnedTier::Config config;
  config.pinned = GENERATE(false, true);
  config.overlapped = !config.pinned;
  PinnedTier tier(config);
  Item item(tier, kSmall);
  const Ticket out = item.copy_out(tier);
  c10::cuda::device_synchronize();
  CHECK(out->done());
}

TEST_CASE("the trace has a batch as one copy of all its bytes", "[gpu][copy_batch]") {
  PinnedTier::Config config;
  config.trace = std::make_shared<Trace>();
  PinnedTier tier(config);
  std::vector<Item> all = items(tier, {kSmall, kSmall, kLarge});
  Ticket last;
  for (Item& item : all) {
    last = item.copy_out(tier);
  }
  last->synchronize();
  tier.update_trace();
  const std::vector<TraceSpan> spans = config.trace->take();
  REQUIRE(spans.size() == 2);
  CHECK(spans[0].bytes == 2 * kSmall);
  CHECK(spans[1].bytes == kLarge);
  CHECK(spans[0].end <= spans[1].begin);
}

}  // namespace ebb
