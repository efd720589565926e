#include "test/simulated/simulated_queues.h"

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include <catch2/catch.hpp>

#include "test/simulated/simulated_stream_guard.h"
#include "test/simulated/simulated_tier.h"
#include "test/streams/simulated/simulated_tensors.h"

namespace ebb {
namespace {

TEST_CASE("asking a late ticket never runs it, waiting for it does, and runs nothing that it need not come after") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const c10::DataPtr x = tier.allocate(kBytes);
  const Block block = *tier.try_acquire(kBytes);
  const Ticket first = tier.copy_out(block, x.get(), {});
  const Ticket second = tier.copy_out(block, x.get(), {});
  const Ticket third = tier.copy_out(block, x.get(), {});
  for (int i = 0; i < 10; ++i) {
    CHECK_FALSE(second->done());
  }
  tier.wait(WaitPoint::kCaller, tier.current_stream(), second);
  CHECK_FALSE(first->done());
  CHECK(second->done());
  CHECK_FALSE(third->done());
}

TEST_CASE("under the early schedule a copy has run as soon as it is queued, unless it waits for a kernel") {
  SimulatedTier tier = deferred(Schedule::kEarly);
  const c10::DataPtr x = tier.allocate(kBytes);
  const Block block = *tier.try_acquire(kBytes);
  for (int i = 0; i < 10; ++i) {
    const Ticket out = tier.copy_out(block, x.get(), {});
    CHECK(out->done());
    CHECK(tier.copy_in(x.get(), block, {WaitPoint::kCaller, out})->done());
  }
  const Ticket kernel = tier.compute(tier.current_stream(), [] {});
  const Ticket point = tier.record(tier.current_stream());
  const Ticket out = tier.copy_out(block, x.get(), {WaitPoint::kCaller, point});
  CHECK_FALSE(out->done());
  kernel->synchronize();
  CHECK(point->done());
  CHECK(out->done());
}

TEST_CASE("waits that force something are stalls, others are not") {
  const bool deferred_compute = GENERATE(false, true);
  SimulatedTier tier(Schedule::kLate, 0, std::nullopt, deferred_compute);
  const c10::DataPtr x = tier.allocate(kBytes);
  const Block block = *tier.try_acquire(kBytes);
  const Ticket first = tier.copy_out(block, x.get(), {});
  const Ticket second = tier.copy_out(block, x.get(), {});
  tier.wait(WaitPoint::kCaller, tier.current_stream(), second);
  tier.wait(WaitPoint::kCaller, tier.current_stream(), first);
  tier.wait(WaitPoint::kCaller, tier.current_stream(), second);
  tier.wait(WaitPoint::kCaller, tier.current_stream(), nullptr);
  (void)tier.record(tier.current_stream());
  tier.compute(tier.current_stream(), [] {})->synchronize();
  const Ticket third = tier.copy_out(block, x.get(), {});
  tier.copy_in(x.get(), block, {WaitPoint::kCaller, third})->synchronize();
  CHECK(second->done());
  CHECK(tier.stall_stats().count == 2);
  CHECK(tier.stall_stats().total_ms == 2);
}

TEST_CASE("deferred kernels run in their stream's order, after what the stream waits for") {
  const auto schedule = GENERATE(Schedule::kLate, Schedule::kEarly);
  SimulatedTier tier = deferred(schedule);
  const c10::Stream main = tier.current_stream();
  const c10::Stream side(c10::Stream::UNSAFE, tier.device(), 7);
  std::string order;
  const Ticket other = tier.compute(side, [&] { order += 'c'; });
  const Ticket first = tier.compute(main, [&] { order += 'a'; });
  tier.wait(WaitPoint::kCaller, side, first);
  const Ticket last = tier.compute(side, [&] { order += 'd'; });
  const Ticket unrelated = tier.compute(main, [&] { order += 'b'; });
  CHECK(order.empty());
  last->synchronize();
  CHECK(order == "cad");
  CHECK(other->done());
  CHECK_FALSE(unrelated->done());
  tier.run_all();
  CHECK(order == "cadb");
}

TEST_CASE("immediate kernels run at once and leave nothing to wait for") {
  SimulatedTier tier = immediate(Schedule::kLate);
  bool ran = false;
  CHECK(tier.compute(tier.current_stream(), [&] { ran = true; })->done());
  CHECK(ran);
  CHECK(is_done(tier.record(tier.current_stream())));
}

TEST_CASE("a random schedule repeats with its seed and differs between seeds") {
  const auto order_of = [](std::uint64_t seed) {
    std::string order;
    SimulatedTier tier(Schedule::kRandom, seed, std::nullopt, true);
    for (c10::StreamId stream = 0; stream < 8; ++stream) {
      tier.compute(c10::Stream(c10::Stream::UNSAFE, tier.device(), stream),
                   [&order, stream] { order += std::to_string(stream); });
    }
    tier.run_all();
    return order;
  };
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    CHECK(order_of(seed) == order_of(seed));
    CHECK(order_of(seed).size() == 8);
    orders.insert(order_of(seed));
  }
  CHECK(orders.size() > 25);
}

TEST_CASE("a chain of waits may be longer than a stack is deep") {
  SimulatedTier tier = immediate(Schedule::kLate);
  const c10::DataPtr x = tier.allocate(8);
  const Block block = *tier.try_acquire(8);
  Ticket last;
  for (int i = 0; i < 100'000; ++i) {
    last = tier.copy_out(block, x.get(), {WaitPoint::kCaller, last});
    last = tier.copy_in(x.get(), block, {WaitPoint::kCaller, last});
  }
  last->synchronize();
  CHECK(last->done());
}

TEST_CASE("a kernel may own the memory that it uses") {
  SimulatedTier tier = deferred(Schedule::kRandom);
  auto x = std::make_shared<c10::DataPtr>(tier.allocate(kBytes));
  tier.compute(tier.current_stream(), [x] { fill(x->get(), 1); });
  x.reset();
  tier.run_all();
  CHECK(tier.device_bytes().now == 0);
}

TEST_CASE("stream guards nest and belong to their thread") {
  SimulatedTier tier = immediate(Schedule::kLate);
  CHECK(tier.current_stream().id() == 0);
  {
    const SimulatedStreamGuard outer(1);
    {
      const SimulatedStreamGuard inner(2);
      CHECK(tier.current_stream().id() == 2);
      c10::StreamId elsewhere = -1;
      std::thread([&] { elsewhere = tier.current_stream().id(); }).join();
      CHECK(elsewhere == 0);
    }
    CHECK(tier.current_stream().id() == 1);
  }
  CHECK(tier.current_stream().id() == 0);
}

TEST_CASE("a ticket of another kind is waited for when its turn comes") {
  class Foreign final : public Completion {
   public:
    [[nodiscard]] bool done() const noexcept override { return done_; }
    void synchronize() const override { done_ = true; }

   private:
    mutable std::atomic<bool> done_ = false;
  };
  SimulatedTier tier = deferred(Schedule::kEarly);
  SimulatedTier elsewhere = immediate(Schedule::kLate);
  const c10::DataPtr x = tier.allocate(kBytes);
  const Block block = *tier.try_acquire(kBytes);
  const auto foreign = std::make_shared<Foreign>();
  const Ticket theirs = elsewhere.copy_out(block, x.get(), {});
  const Ticket out = tier.copy_out(block, x.get(), {WaitPoint::kCaller, Tickets{foreign, theirs}});
  CHECK_FALSE(out->done());
  out->synchronize();
  CHECK(foreign->done());
  CHECK(theirs->done());
}

}  // namespace
}  // namespace ebb
