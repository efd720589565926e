// What every tier promises (streams/base/tier.h), each promise asked of each tier. A new tier gets a line in
// each_tier().

#include "streams/base/tier.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>
#include <cuda_runtime_api.h>

#include "streams/base/host_completion.h"
#include "streams/disk/disk_tier.h"
#include "streams/gpu/pinned_tier.h"
#include "test/simulated/simulated_tier.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint64_t kCapacity = 4 * kMiB;

struct Subject {
  std::string name;
  std::shared_ptr<Tier> tier;
  std::function<void(void*, const Bytes&)> write;  // as work of the current stream
  std::function<Bytes(const void*, std::size_t)> read;
};

void memory_write(void* to, const Bytes& from) { std::memcpy(to, from.data(), from.size()); }

Bytes memory_read(const void* from, std::size_t count) {
  const auto* const first = static_cast<const std::byte*>(from);
  return {first, first + count};
}

Subject on_disk() {
  return {"DiskTier", std::make_shared<DiskTier>("/var/tmp", kCapacity, each_engine()), memory_write, memory_read};
}

Subject simulated(Schedule schedule) {
  return {"SimulatedTier", std::make_shared<SimulatedTier>(schedule, 1, kCapacity, /*deferred_compute=*/false),
          memory_write, memory_read};
}

Subject deferred(Schedule schedule) {
  auto tier = std::make_shared<SimulatedTier>(schedule, 1, kCapacity, /*deferred_compute=*/true);
  const auto run = [tier = tier.get()](std::function<void()> kernel) {
    return tier->compute(tier->current_stream(), std::move(kernel));
  };
  return {"SimulatedTier, deferred", tier,
          [run](void* to, const Bytes& from) { run([to, from] { memory_write(to, from); }); },
          [run](const void* from, std::size_t count) {
            Bytes read;
            run([&] { read = memory_read(from, count); })->synchronize();
            return read;
          }};
}

Subject pinned(bool pinned, bool overlapped) {
  PinnedTier::Config config;
  config.pinned = pinned;
  config.overlapped = overlapped;
  config.capacity_bytes = kCapacity;
  return {"PinnedTier", std::make_shared<PinnedTier>(config),
          [](void* to, const Bytes& from) {
            REQUIRE(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyDefault, nullptr) == cudaSuccess);
          },
          [](const void* from, std::size_t count) {
            Bytes read(count);
            REQUIRE(cudaMemcpy(read.data(), from, count, cudaMemcpyDefault) == cudaSuccess);
            return read;
          }};
}

using MakeSubject = std::function<Subject()>;

MakeSubject each_tier() {
  return GENERATE(
      MakeSubject(on_disk), MakeSubject([] { return simulated(Schedule::kLate); }),
      MakeSubject([] { return simulated(Schedule::kEarly); }), MakeSubject([] { return simulated(Schedule::kRandom); }),
      MakeSubject([] { return deferred(Schedule::kLate); }), MakeSubject([] { return deferred(Schedule::kRandom); }));
}

MakeSubject each_gpu_tier() {
  return GENERATE(MakeSubject([] { return pinned(true, true); }), MakeSubject([] { return pinned(true, false); }),
                  MakeSubject([] { return pinned(false, true); }));
}

// Memory of the device that holds the bytes as soon as the current stream gets there.
c10::DataPtr holding(const Subject& subject, const Bytes& bytes) {
  c10::DataPtr memory = subject.tier->allocate(bytes.size());
  subject.write(memory.get(), bytes);
  return memory;
}

Ticket copy_out(const Subject& subject, const Block& to, const c10::DataPtr& from) {
  After after(WaitPoint::kCaller, subject.tier->current_stream());
  after.add(WaitPoint::kCaller, to.gates());
  return subject.tier->copy_out(to, from.get(), after);
}

// What the block holds after the ticket. Its reader is a gate of the block.
Bytes content(const Subject& subject, Block& block, const Ticket& after) {
  const c10::Stream stream = subject.tier->current_stream();
  const c10::DataPtr back = holding(subject, Bytes(block.size()));
  After both(WaitPoint::kCaller, after);
  both.add(WaitPoint::kCaller, stream);
  const Ticket in = subject.tier->copy_in(back.get(), block, both);
  block.prepare_gate();
  block.gate(WaitPoint::kCaller, in);
  subject.tier->wait(WaitPoint::kCaller, stream, in);
  return subject.read(back.get(), block.size());
}

Ticket failed_ticket() {
  auto failed = std::make_shared<HostCompletion>();
  failed->finish(std::make_exception_ptr(std::runtime_error("the bytes are lost")));
  return failed;
}

void check_round_trip(const Subject& subject) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{4097}, kMiB + 3}) {
    const Bytes bytes = random_bytes(size, 1);
    std::optional<Block> block = subject.tier->try_acquire(size);
    REQUIRE(block);
    CHECK(block->size() == size);
    CHECK(subject.tier->pool_stats().now_bytes >= size);
    const c10::DataPtr memory = holding(subject, bytes);
    CHECK(memory.device() == subject.tier->device());
    CHECK(content(subject, *block, copy_out(subject, *block, memory)) == bytes);
  }
}

void check_capacity(const Subject& subject) {
  std::optional<Block> all = subject.tier->try_acquire(kCapacity);
  REQUIRE(all);
  CHECK_FALSE(subject.tier->try_acquire(1));
  all.reset();
  CHECK(subject.tier->try_acquire(1));
  CHECK(subject.tier->pool_stats().now_bytes == 0);
  CHECK(subject.tier->pool_stats().peak_bytes == kCapacity);
}

// A copy in of the first lease may be under way when the bytes are leased and written again: the gates say so.
void check_gates(const Subject& subject) {
  const Bytes first = random_bytes(kCapacity, 1);
  const Bytes second = random_bytes(kCapacity, 2);
  const c10::Stream stream = subject.tier->current_stream();
  std::optional<Block> block = subject.tier->try_acquire(kCapacity);
  REQUIRE(block);
  const c10::DataPtr memory = holding(subject, first);
  const Ticket out = copy_out(subject, *block, memory);
  const c10::DataPtr back = holding(subject, Bytes(kCapacity));
  After after(WaitPoint::kCaller, out);
  after.add(WaitPoint::kCaller, stream);
  const Ticket in = subject.tier->copy_in(back.get(), *block, after);
  block->prepare_gate();
  block->gate(WaitPoint::kCaller, in);
  block.reset();

  block = subject.tier->try_acquire(kCapacity);
  REQUIRE(block);
  const c10::DataPtr other = holding(subject, second);
  const Ticket out_again = copy_out(subject, *block, other);
  subject.tier->wait(WaitPoint::kCaller, stream, in);
  CHECK(subject.read(back.get(), kCapacity) == first);
  CHECK(content(subject, *block, out_again) == second);
}

void check_errors(const Subject& subject) {
  const Bytes bytes = random_bytes(4096, 1);
  std::optional<Block> block = subject.tier->try_acquire(bytes.size());
  REQUIRE(block);
  const c10::DataPtr memory = holding(subject, bytes);
  After after(WaitPoint::kCaller, failed_ticket());
  after.add(WaitPoint::kCaller, subject.tier->current_stream());
  const Ticket out = subject.tier->copy_out(*block, memory.get(), after);
  const c10::DataPtr back = holding(subject, Bytes(bytes.size()));
  CHECK_THROWS_WITH(subject.tier->copy_in(back.get(), *block, {WaitPoint::kCaller, failed_ticket()})->synchronize(),
                    Catch::Contains("the bytes are lost"));
  CHECK(content(subject, *block, out) == bytes);  // a copy out starts even so, and the tier goes on
  subject.tier->wait(WaitPoint::kCaller, subject.tier->current_stream(), nullptr);
}

void check_lifetime(Subject subject) {
  const Bytes bytes = random_bytes(4096, 1);
  std::optional<Block> block = subject.tier->try_acquire(bytes.size());
  REQUIRE(block);
  const c10::DataPtr memory = holding(subject, bytes);
  copy_out(subject, *block, memory)->synchronize();
  subject = {};
  CHECK(block->size() == bytes.size());
  block.reset();
}

}  // namespace

#define EBB_FOR_EACH_TIER(promise, check)                               \
  TEST_CASE("every tier: " promise, "[tier]") { check(each_tier()()); } \
  TEST_CASE("every tier of a GPU: " promise, "[gpu][tier]") { check(each_gpu_tier()()); }

EBB_FOR_EACH_TIER("bytes come back as they left", check_round_trip)
EBB_FOR_EACH_TIER("the capacity is kept to, and room comes back", check_capacity)
EBB_FOR_EACH_TIER("a block's gates order its next writer behind its readers", check_gates)
EBB_FOR_EACH_TIER("a copy in fails with a failed ticket's error, and a copy out does not", check_errors)
EBB_FOR_EACH_TIER("a block may outlive the tier", check_lifetime)

}  // namespace ebb
