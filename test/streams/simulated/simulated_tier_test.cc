#include "test/simulated/simulated_tier.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "test/simulated/simulated_stream_guard.h"
#include "test/streams/simulated/simulated_tensors.h"

namespace ebb {
namespace {

TEST_CASE("a copy out whose source is freed before it ran delivers NaN") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const Block block = *tier.try_acquire(kBytes);
  c10::DataPtr x = tier.allocate(kBytes);
  fill(x.get(), 1);
  const Ticket out = tier.copy_out(block, x.get(), {});
  x.clear();
  out->synchronize();
  CHECK(holds_nan(block.data()));
}

TEST_CASE("a copy in that does not wait for the copy out delivers NaN, and one that does delivers the bytes") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const Block block = *tier.try_acquire(kBytes);
  const c10::DataPtr x = tier.allocate(kBytes);
  const c10::DataPtr y = tier.allocate(kBytes);
  fill(x.get(), 1);
  fill(y.get(), 2);
  const Ticket out = tier.copy_out(block, x.get(), {});
  tier.copy_in(y.get(), block, {})->synchronize();
  CHECK(holds_nan(y.get()));
  CHECK_FALSE(out->done());
  tier.copy_in(y.get(), block, {WaitPoint::kCaller, out})->synchronize();
  CHECK(holds(y.get(), 1));
}

TEST_CASE("an early copy out that waits for no recorded point reads what was there before the kernel") {
  SimulatedTier tier = deferred(Schedule::kEarly);
  const c10::Stream stream = tier.current_stream();
  const c10::DataPtr x = tier.allocate(kBytes);
  const Block hasty = *tier.try_acquire(kBytes);
  const Block patient = *tier.try_acquire(kBytes);
  tier.compute(stream, [&] { fill(x.get(), 1); });
  const Ticket early = tier.copy_out(hasty, x.get(), {});
  const Ticket late = tier.copy_out(patient, x.get(), {WaitPoint::kCaller, tier.record(stream)});
  CHECK(early->done());
  CHECK_FALSE(late->done());
  late->synchronize();
  CHECK(holds_nan(hasty.data()));
  CHECK(holds(patient.data(), 1));
}

TEST_CASE("a lane that ignores a block's gates overwrites what is still to be read") {
  const bool obeys = GENERATE(false, true);
  SimulatedTier tier = immediate(Schedule::kLate);
  const c10::DataPtr x = tier.allocate(kBytes);
  const c10::DataPtr other = tier.allocate(kBytes);
  const c10::DataPtr y = tier.allocate(kBytes);
  fill(x.get(), 1);
  fill(other.get(), 2);
  std::optional<Block> block = tier.try_acquire(kBytes);
  const Ticket in = tier.copy_in(y.get(), *block, {WaitPoint::kCaller, tier.copy_out(*block, x.get(), {})});
  block->gate(WaitPoint::kCaller, in);
  const std::uint64_t address = block->address();
  block.reset();

  const Block next = *tier.try_acquire(kBytes);
  REQUIRE(next.address() == address);
  REQUIRE(next.gates() == Tickets{in});
  tier.copy_out(next, other.get(), obeys ? After(WaitPoint::kCaller, next.gates()) : After())->synchronize();
  in->synchronize();
  CHECK((holds(y.get(), 1) && holds(next.data(), 2)) == obeys);
}

TEST_CASE("a block that is released without the gate of its reader is read as NaN") {
  const bool gated = GENERATE(false, true);
  SimulatedTier tier = immediate(Schedule::kLate);
  const c10::DataPtr y = tier.allocate(kBytes);
  std::optional<Block> block = tier.try_acquire(kBytes);
  fill(block->data(), 1);
  const Ticket in = tier.copy_in(y.get(), *block, {});
  if (gated) {
    block->gate(WaitPoint::kCaller, in);
  }
  block.reset();
  in->synchronize();
  CHECK(holds(y.get(), 1) == gated);
  CHECK(holds_nan(y.get()) != gated);
}

TEST_CASE("a block without gates is leased full of NaN") {
  SimulatedTier tier = immediate(Schedule::kLate);
  std::optional<Block> block = tier.try_acquire(kBytes);
  CHECK(holds_nan(block->data()));
  const c10::DataPtr y = tier.allocate(kBytes);
  fill(block->data(), 1);
  const Ticket in = tier.copy_in(y.get(), *block, {});
  block->gate(WaitPoint::kCaller, in);
  block.reset();
  in->synchronize();
  block = tier.try_acquire(kBytes);
  CHECK(block->gates().empty());
  CHECK(holds_nan(block->data()));
}

TEST_CASE("freed device memory goes to the next request of its size on its stream, the last freed first") {
  SimulatedTier tier = immediate(Schedule::kLate);
  c10::DataPtr first = tier.allocate(kBytes);
  c10::DataPtr second = tier.allocate(kBytes);
  void* const older = first.get();
  void* const newer = second.get();
  CHECK(holds_nan(older));
  CHECK(reinterpret_cast<std::uintptr_t>(older) % 64 == 0);
  fill(older, 1);
  fill(newer, 1);
  first.clear();
  second.clear();
  CHECK(holds_nan(older));
  CHECK(tier.device_bytes().now == 0);
  CHECK(tier.device_bytes().peak == 2 * kBytes);
  {
    const SimulatedStreamGuard side(3);
    CHECK(tier.allocate(kBytes).get() != newer);
  }
  CHECK(tier.allocate(kBytes - 1).get() != newer);
  const c10::DataPtr third = tier.allocate(kBytes);
  const c10::DataPtr fourth = tier.allocate(kBytes);
  CHECK(third.get() == newer);
  CHECK(fourth.get() == older);
  CHECK(tier.allocate(0).get() == nullptr);
}

TEST_CASE("with deferred compute memory is poisoned in the order of the stream that allocated it") {
  SimulatedTier tier = deferred(Schedule::kLate);
  const c10::Stream stream = tier.current_stream();
  bool right = false;
  c10::DataPtr x = tier.allocate(kBytes);
  void* const address = x.get();
  tier.compute(stream, [=] { fill(address, 1); });
  tier.compute(stream, [=, &right] { right = holds(address, 1); });
  {
    const SimulatedStreamGuard side(3);
    x.clear();
  }
  const c10::DataPtr y = tier.allocate(kBytes);
  CHECK(y.get() == address);
  tier.record(stream)->synchronize();
  CHECK(right);
  CHECK(holds_nan(address));
}

TEST_CASE("the copy chosen to fail moves nothing and says so at every wait for it") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const c10::DataPtr x = tier.allocate(kBytes);
  fill(x.get(), 1);
  const Block good = *tier.try_acquire(kBytes);
  const Block bad = *tier.try_acquire(kBytes);
  tier.fail_copy(2);
  const Ticket first = tier.copy_out(good, x.get(), {});
  const Ticket second = tier.copy_out(bad, x.get(), {});
  const Ticket third = tier.copy_in(x.get(), good, {WaitPoint::kCaller, first});
  CHECK_NOTHROW(third->synchronize());
  CHECK_NOTHROW(first->synchronize());
  CHECK_THROWS_WITH(second->synchronize(), "simulated copy failure");
  CHECK_THROWS_WITH(tier.wait(WaitPoint::kCaller, tier.current_stream(), second), "simulated copy failure");
  CHECK(second->done());
  CHECK(holds(good.data(), 1));
  CHECK(holds_nan(bad.data()));
}

TEST_CASE("a copy from or to null cannot be queued") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const Block block = *tier.try_acquire(kBytes);
  CHECK_THROWS_AS(tier.copy_out(block, nullptr, {}), c10::Error);
  CHECK_THROWS_AS(tier.copy_in(nullptr, block, {}), c10::Error);
}

TEST_CASE("a full simulated tier has no block") {
  SimulatedTier tier(Schedule::kLate, 0, 2 * BlockPool::kAlignment, false);
  std::optional<Block> block = tier.try_acquire(kBytes);
  CHECK(block.has_value());
  CHECK_FALSE(tier.try_acquire(kBytes).has_value());
  CHECK(tier.pool_stats().now_bytes == 2 * BlockPool::kAlignment);
  block.reset();
  CHECK(tier.try_acquire(kBytes).has_value());
}

TEST_CASE("what a tier has not run when it ends never runs, and its memory and blocks may outlive it") {
  const bool deferred_compute = GENERATE(false, true);
  auto tier = std::make_unique<SimulatedTier>(Schedule::kLate, 0, std::nullopt, deferred_compute);
  c10::DataPtr x = tier->allocate(kBytes);
  std::optional<Block> block = tier->try_acquire(kBytes);
  const Ticket out = tier->copy_out(*block, x.get(), {});
  block->gate(WaitPoint::kCaller, out);
  tier.reset();
  CHECK(out->done());
  CHECK_THROWS_AS(out->synchronize(), std::runtime_error);
  CHECK(holds_nan(block->data()));
  fill(x.get(), 1);
  block.reset();
  x.clear();
}

}  // namespace
}  // namespace ebb
