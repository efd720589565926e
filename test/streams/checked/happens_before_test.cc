#include "test/checked/happens_before.h"

#include <memory>
#include <string>
#include <vector>

#include <catch2/catch.hpp>

#include "test/checked/checked_tier.h"
#include "test/streams/simulated/simulated_tensors.h"

namespace ebb {
namespace {

using Kind = HappensBefore::Kind;
using Clock = HappensBefore::Clock;

constexpr HappensBefore::Space kBlocks = 1;
constexpr HappensBefore::Range kSource{HappensBefore::kDevice, 1000, 100};
constexpr HappensBefore::Range kTarget{HappensBefore::kDevice, 5000, 100};
constexpr HappensBefore::Range kBlock{kBlocks, 0, 100};

std::vector<std::string>& violations() {
  static std::vector<std::string> violations;
  return violations;
}

void keep(const std::string& violation) { violations().push_back(violation); }

// A check of its own, whose violations are kept instead of ending the process.
struct World {
  World() {
    violations().clear();
    order.set_handler(&keep);
  }
  HappensBefore order;
  const HappensBefore::Actor stream = order.make_actor("stream 7");
  const HappensBefore::Actor other = order.make_actor("stream 8");
};

TEST_CASE_METHOD(World, "a copy in that is not behind the copy out of its block is reported, with both by name") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  CHECK(violations().empty());
  static_cast<void>(order.copy("copy in", {}, kBlock, kTarget));
  REQUIRE(violations().size() == 1);
  CHECK_THAT(violations().front(), Catch::StartsWith("copy in #") &&
                                       Catch::Contains("reads 100 bytes at 0 of its tier") &&
                                       Catch::Contains(", which copy out #") && Catch::Contains("writes"));
}

TEST_CASE_METHOD(World, "a ticket in the list, a stream that has waited, and a host that has asked each order a copy") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  SECTION("a ticket in the list") { static_cast<void>(order.copy("copy in", {out}, kBlock, kTarget)); }
  SECTION("a stream that has waited") {
    order.join(stream, out);
    static_cast<void>(order.copy("copy in", {order.point(stream)}, kBlock, kTarget));
  }
  SECTION("a host that has asked") {
    order.join(HappensBefore::kHost, out);
    static_cast<void>(order.copy("copy in", {}, kBlock, kTarget));
  }
  CHECK(violations().empty());
}

TEST_CASE_METHOD(World, "what one stream has waited for, another does not know") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  order.join(stream, out);
  static_cast<void>(order.copy("copy in", {order.point(other)}, kBlock, kTarget));
  CHECK(violations().size() == 1);
}

TEST_CASE_METHOD(
    World, "a stream that has ended is in no clock, orders its accesses before all later, and frees as the host") {
  order.access(stream, Kind::kWrite, kSource);
  order.access(other, Kind::kWrite, kTarget);
  static_cast<void>(order.point(stream));
  order.end(stream);
  CHECK(order.copy("copy out", {}, kSource, kBlock).size() == 1);
  CHECK(violations().empty());
  order.access(stream, Kind::kFree, kTarget);  // the other stream's, which nothing orders
  CHECK(violations().size() == 1);
}

TEST_CASE_METHOD(World, "memory that a copy still uses must not be freed, by a stream or by the host") {
  const HappensBefore::Actor actor = GENERATE(std::uint64_t{0}, std::uint64_t{1});
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  order.access(actor, Kind::kFree, kSource);
  CHECK(violations().size() == 1);
}

TEST_CASE_METHOD(World, "two reads need no order, and neither do accesses to different bytes") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  order.access(stream, Kind::kRead, kSource);
  order.access(stream, Kind::kWrite, {HappensBefore::kDevice, 1100, 50});
  order.access(stream, Kind::kWrite, {HappensBefore::kDevice, 900, 100});
  order.access(stream, Kind::kWrite, {kBlocks + 1, 0, 100});
  CHECK(violations().empty());
  order.access(stream, Kind::kWrite, {HappensBefore::kDevice, 1099, 1});
  CHECK(violations().size() == 1);
}

TEST_CASE_METHOD(World, "what a stream made before a copy was asked for must come before it, but not after another") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  order.access(stream, Kind::kMade, kSource);  // a legal write in place: the first save will be refused
  CHECK(violations().empty());
  static_cast<void>(order.copy("copy out", {}, kSource, {kBlocks, 200, 100}));
  CHECK(violations().size() == 1);
}

TEST_CASE_METHOD(World, "memory that went back to the system is other memory when it comes again") {
  const Clock out = order.copy("copy out", {}, kSource, kBlock);
  order.forget({HappensBefore::kDevice, 1000, 50});
  order.access(stream, Kind::kWrite, {HappensBefore::kDevice, 1000, 50});
  CHECK(violations().empty());
  order.access(stream, Kind::kWrite, {HappensBefore::kDevice, 1050, 50});
  CHECK(violations().size() == 1);
}

TEST_CASE("a checked tier reports a wait that its caller has forgotten, and nothing where none is") {
  const bool forgotten = GENERATE(false, true);
  violations().clear();
  const auto former = HappensBefore::instance().set_handler(&keep);
  {
    const auto simulated = std::make_shared<SimulatedTier>(Schedule::kLate, 0, std::nullopt, /*deferred_compute=*/true);
    const std::shared_ptr<Tier> tier = checked(simulated);
    const c10::Stream stream = tier->current_stream();
    const c10::DataPtr x = tier->allocate(kBytes);
    const c10::DataPtr y = tier->allocate(kBytes);
    const std::optional<Block> block = tier->try_acquire(kBytes);
    tier->made(stream, x.get(), kBytes);
    const Ticket out = tier->copy_out(*block, x.get(), {WaitPoint::kCaller, tier->record(stream)});
    After after(WaitPoint::kCaller, tier->record(stream));
    if (!forgotten) {
      after.add(WaitPoint::kCaller, out);
    }
    const Ticket in = tier->copy_in(y.get(), *block, after);
    tier->wait(WaitPoint::kCaller, stream, in);
    tier->used(stream, y.get(), kBytes);
    tier->wait(WaitPoint::kCaller, stream, out);
    simulated->run_all();
    CHECK(in->done());
  }
  HappensBefore::instance().set_handler(former);
  CHECK(violations().size() == (forgotten ? 1 : 0));
}

TEST_CASE_METHOD(World, "memory that is freed once its users are idle comes behind every stream, and behind no copy") {
  order.access(other, Kind::kRead, kTarget);
  SECTION("a stream") {
    order.access(stream, Kind::kFree, kTarget, HappensBefore::Behind::kAllStreams);
    CHECK(violations().empty());
  }
  SECTION("a copy that a stream has waited for") {
    order.join(other, order.copy("copy in", {}, kBlock, kSource));
    order.access(stream, Kind::kFree, kSource, HappensBefore::Behind::kAllStreams);
    CHECK(violations().empty());
  }
  SECTION("a copy that none has waited for") {
    static_cast<void>(order.copy("copy in", {}, kBlock, kSource));
    order.access(stream, Kind::kFree, kSource, HappensBefore::Behind::kAllStreams);
    CHECK(violations().size() == 1);
  }
  SECTION("what comes after it") {
    order.access(stream, Kind::kFree, kTarget, HappensBefore::Behind::kAllStreams);
    order.access(other, Kind::kRead, kTarget);
    CHECK(violations().size() == 1);
  }
}

TEST_CASE_METHOD(World, "what a program makes in memory is behind the free that gave the program the memory") {
  order.access(stream, Kind::kFree, kSource);
  SECTION("a copy of what was made") {
    order.access(other, Kind::kMade, kSource);
    static_cast<void>(order.copy("copy out", {order.point(other)}, kSource, kBlock));
    CHECK(violations().empty());
  }
  SECTION("also behind a copy in that another stream has waited for") {
    order.join(stream, order.copy("copy in", {order.point(stream)}, kBlock, kSource));
    order.access(other, Kind::kMade, kSource);
    static_cast<void>(order.copy("copy out", {order.point(other)}, kSource, {kBlocks, 500, 100}));
    CHECK(violations().empty());
  }
  SECTION("not behind one that no stream has waited for") {
    static_cast<void>(order.copy("copy in", {order.point(stream)}, kBlock, kSource));
    order.access(other, Kind::kMade, kSource);
    static_cast<void>(order.copy("copy out", {order.point(other)}, kSource, {kBlocks, 500, 100}));
    CHECK(violations().size() == 1);
  }
  SECTION("a copy into memory in which nothing was made") {
    static_cast<void>(order.copy("copy in", {order.point(other)}, kBlock, kSource));
    CHECK(violations().size() == 1);
  }
}

}  // namespace
}  // namespace ebb
