// Whether a program with all its waits is right under every schedule, and wrong without any one of them.

#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "test/simulated/simulated_stream_guard.h"
#include "test/simulated/simulated_tier.h"
#include "test/streams/simulated/simulated_tensors.h"

namespace ebb {
namespace {

// Each step of this program is ordered by one wait; `Missing` names the one left out.
//
//   compute:   make x | record | .......... | wait out, free x | record | .......... | wait in, use y, free y
//   out lane:                  | x -> block
//   in lane:                                                            | block -> y
//
// The two newest x are still there when the copies in begin, so nothing but its own wait holds a copy in back.
enum class Missing { kNothing, kOutAfterMade, kFreeAfterOut, kInAfterOut, kInAfterFreed, kUseAfterIn };

// Runs forward and backward over eight tensors, twice, and returns how many uses saw wrong bytes.
int wrong_uses(SimulatedTier& tier, Missing missing) {
  struct Saved {
    Block block;
    Ticket out;
    float value;
  };
  struct Source {
    c10::DataPtr x;
    Ticket out;
  };
  const c10::Stream stream = tier.current_stream();
  std::atomic<int> wrong = 0;
  std::deque<Source> stash;
  const auto free_oldest = [&] {
    if (missing != Missing::kFreeAfterOut) {
      tier.wait(WaitPoint::kCaller, stream, stash.front().out);
    }
    stash.pop_front();
  };
  for (int step = 0; step < 2; ++step) {
    std::vector<Saved> saved;
    for (int layer = 0; layer < 8; ++layer) {
      const float value = static_cast<float>(100 * step + layer + 1);
      c10::DataPtr x = tier.allocate(kBytes);
      tier.compute(stream, [at = x.get(), value] { fill(at, value); });
      Block block = *tier.try_acquire(kBytes);
      Tickets after = block.gates();
      if (missing != Missing::kOutAfterMade) {
        after.push_back(tier.record(stream));
      }
      Ticket out = tier.copy_out(block, x.get(), {WaitPoint::kCaller, after});
      stash.push_back({std::move(x), out});
      if (stash.size() > 2) {
        free_oldest();
      }
      saved.push_back({std::move(block), std::move(out), value});
    }
    while (!saved.empty()) {
      Saved& last = saved.back();
      c10::DataPtr y = tier.allocate(kBytes);
      Tickets after;
      if (missing != Missing::kInAfterOut) {
        after.push_back(last.out);
      }
      if (missing != Missing::kInAfterFreed) {
        after.push_back(tier.record(stream));
      }
      const Ticket in = tier.copy_in(y.get(), last.block, {WaitPoint::kCaller, after});
      last.block.gate(WaitPoint::kCaller, in);
      if (missing != Missing::kUseAfterIn) {
        tier.wait(WaitPoint::kCaller, stream, in);
      }
      tier.compute(stream, [at = y.get(), value = last.value, &wrong] { wrong += holds(at, value) ? 0 : 1; });
      saved.pop_back();
    }
    while (!stash.empty()) {
      free_oldest();
    }
  }
  tier.run_all();
  return wrong;
}

TEST_CASE("with every wait in place all schedules and seeds give the right bytes") {
  const bool deferred_compute = GENERATE(false, true);
  const auto schedule = GENERATE(Schedule::kLate, Schedule::kEarly, Schedule::kRandom);
  CAPTURE(deferred_compute, static_cast<int>(schedule));
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SimulatedTier tier(schedule, seed, std::nullopt, deferred_compute);
    REQUIRE(wrong_uses(tier, Missing::kNothing) == 0);
    REQUIRE(tier.pool_stats().now_bytes == 0);
    REQUIRE(tier.device_bytes().now == 0);
  }
}

TEST_CASE("each missing wait gives wrong bytes under the schedule that is made to find it") {
  struct Row {
    Missing missing;
    Schedule schedule;
    bool deferred_compute;
  };
  const Row row =
      GENERATE(Row{Missing::kOutAfterMade, Schedule::kEarly, true}, Row{Missing::kFreeAfterOut, Schedule::kLate, false},
               Row{Missing::kInAfterOut, Schedule::kLate, false}, Row{Missing::kInAfterFreed, Schedule::kEarly, true},
               Row{Missing::kUseAfterIn, Schedule::kLate, false});
  CAPTURE(static_cast<int>(row.missing), static_cast<int>(row.schedule), row.deferred_compute);
  SimulatedTier tier(row.schedule, 0, std::nullopt, row.deferred_compute);
  CHECK(wrong_uses(tier, row.missing) > 0);
}

TEST_CASE("a random schedule finds every missing wait with one of fifty seeds") {
  const auto missing = GENERATE(Missing::kOutAfterMade, Missing::kFreeAfterOut, Missing::kInAfterOut,
                                Missing::kInAfterFreed, Missing::kUseAfterIn);
  CAPTURE(static_cast<int>(missing));
  int found = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SimulatedTier tier(Schedule::kRandom, seed, std::nullopt, true);
    found += wrong_uses(tier, missing) > 0 ? 1 : 0;
  }
  CHECK(found > 0);
}

TEST_CASE("two threads with streams of their own each get the right bytes back") {
  const bool deferred_compute = GENERATE(false, true);
  const auto schedule = GENERATE(Schedule::kLate, Schedule::kEarly, Schedule::kRandom);
  SimulatedTier tier(schedule, 1, std::nullopt, deferred_compute);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (c10::StreamId stream = 1; stream <= 2; ++stream) {
    threads.emplace_back([&, stream] {
      const SimulatedStreamGuard guard(stream);
      for (int i = 0; i < 20; ++i) {
        wrong += wrong_uses(tier, Missing::kNothing);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
  CHECK(tier.pool_stats().now_bytes == 0);
}

}  // namespace
}  // namespace ebb
