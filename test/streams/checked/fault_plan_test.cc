#include "test/checked/fault_plan.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "streams/disk/disk_tier.h"
#include "streams/disk/uring_io.h"
#include "test/simulated/simulated_tier.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

using Extent = FaultPlan::Extent;

std::vector<bool> answers(FaultPoint point, int count) {
  std::vector<bool> answers;
  for (int i = 0; i < count; ++i) {
    answers.push_back(fails(point));
  }
  return answers;
}

TEST_CASE("a planned fault hits the n-th call of its point once, or from then on, and no other point") {
  FaultPlan::disarm();
  CHECK(answers(FaultPoint::kOpen, 3) == std::vector<bool>{false, false, false});
  {
    const PlannedFault once(FaultPoint::kOpen, 2, Extent::kOnce);
    CHECK(answers(FaultPoint::kOpen, 4) == std::vector<bool>{false, true, false, false});
    CHECK(answers(FaultPoint::kPread, 4) == std::vector<bool>{false, false, false, false});
    CHECK(FaultPlan::calls(FaultPoint::kOpen) == 4);
    CHECK(FaultPlan::failures(FaultPoint::kOpen) == 1);
    CHECK(FaultPlan::calls(FaultPoint::kPread) == 4);
    CHECK(FaultPlan::failures(FaultPoint::kPread) == 0);
  }
  CHECK(FaultPlan::calls(FaultPoint::kOpen) == 0);
  const PlannedFault always(FaultPoint::kThreadStart, 2, Extent::kFromThenOn);
  CHECK(answers(FaultPoint::kThreadStart, 4) == std::vector<bool>{false, true, true, true});
  CHECK(FaultPlan::failures(FaultPoint::kThreadStart) == 3);
}

// A pool asks a system that has refused again after a while.
void forget_refusal() { std::this_thread::sleep_for(2 * BlockPool::kRefusalLasts); }

// Takes a block out and back in, and checks what came back.
void round_trip(Tier& tier) {
  static const auto content = random_bytes(9 * kMiB + 5, 1);  // nineteen chunks
  const auto block = tier.try_acquire(content.size());
  REQUIRE(block.has_value());
  const Ticket out = tier.copy_out(*block, content.data(), {WaitPoint::kCaller, block->gates()});
  const c10::DataPtr back = tier.allocate(content.size());
  tier.wait(WaitPoint::kCaller, tier.current_stream(), tier.copy_in(back.get(), *block, {WaitPoint::kCaller, out}));
  CHECK(std::memcmp(back.get(), content.data(), content.size()) == 0);
}

TEST_CASE("every call of a disk tier that can fail reports its own error, and the tier goes on") {
  const DiskIo engine = each_engine();
  DiskTier tier("/var/tmp", std::nullopt, engine);
  const auto [point, text] = GENERATE(table<FaultPoint, const char*>({
      {FaultPoint::kDeviceAllocation, "of memory to copy back to"},
      {FaultPoint::kCopy, "cannot queue a copy"},
      {FaultPoint::kPread, "Input/output error"},
      {FaultPoint::kPwrite, "Input/output error"},
  }));
  CAPTURE(static_cast<int>(point));
  {
    const PlannedFault fault(point, 1, Extent::kOnce);
    CHECK_THROWS_WITH(round_trip(tier), Catch::Contains(text));
    CHECK(FaultPlan::failures(point) == 1);
  }
  CHECK(tier.pool_stats().now_bytes == 0);
  round_trip(tier);
}

TEST_CASE("a disk tier whose folder, file or threads the system refuses is not made, and says why") {
  const DiskIo engine = each_engine();
  const auto [point, reason] = GENERATE(table<FaultPoint, std::errc>({
      {FaultPoint::kOpen, std::errc::too_many_files_open},
      {FaultPoint::kThreadStart, std::errc::resource_unavailable_try_again},
  }));
  CAPTURE(static_cast<int>(point));
  const PlannedFault fault(point, 1, Extent::kOnce);
  std::error_code code;
  try {
    const DiskTier tier("/var/tmp", std::nullopt, engine);
  } catch (const std::system_error& error) {
    code = error.code();
  }
  CHECK(code == reason);
  round_trip(*std::make_unique<DiskTier>("/var/tmp", std::nullopt, engine));
}

TEST_CASE("a disk that is full when the spill file is to grow leaves no room, and gives it later") {
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  {
    const PlannedFault fault(FaultPoint::kFallocate, 1, Extent::kFromThenOn);
    CHECK_FALSE(tier.try_acquire(kMiB).has_value());
  }
  forget_refusal();
  round_trip(tier);
}

TEST_CASE("a simulated tier refuses what it is told to") {
  SimulatedTier tier(Schedule::kLate, 0, std::nullopt, false);
  {
    const PlannedFault fault(FaultPoint::kPinnedAllocation, 1, Extent::kFromThenOn);
    CHECK_FALSE(tier.try_acquire(1).has_value());
  }
  forget_refusal();
  {
    const PlannedFault fault(FaultPoint::kDeviceAllocation, 1, Extent::kOnce);
    CHECK_THROWS_AS(round_trip(tier), c10::OutOfMemoryError);
  }
  {
    const PlannedFault fault(FaultPoint::kCopy, 2, Extent::kOnce);
    CHECK_THROWS_AS(round_trip(tier), c10::Error);
  }
  round_trip(tier);
}

TEST_CASE("chunks that the ring refuses, at every submission and wait or at some, arrive all the same") {
  if (UringIo::refusal()) {
    WARN("SKIPPED: this process may not use io_uring");
    return;
  }
  const FaultPoint point = GENERATE(FaultPoint::kUringSubmission, FaultPoint::kUringWait);
  const std::uint64_t nth = GENERATE(1, 2, 3, 4, 20, 37, 38);  // 19 writes are submitted first, then 19 reads
  const Extent extent = GENERATE(Extent::kOnce, Extent::kFromThenOn);
  CAPTURE(static_cast<int>(point), nth, static_cast<int>(extent));
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kUring);
  {
    const PlannedFault fault(point, nth, extent);
    for (int i = 0; i < 6; ++i) {  // more refused entries than the ring has room for
      round_trip(tier);
    }
    CHECK(FaultPlan::failures(point) >= 1);
  }
  const PlannedFault never(FaultPoint::kUringWait, 1'000'000, Extent::kOnce);
  round_trip(tier);
  CHECK(FaultPlan::calls(FaultPoint::kUringWait) > 19);  // one for each read, and for writes: both rings are used again
}

}  // namespace
}  // namespace ebb
