#include "streams/disk/disk_tier.h"

#include <sys/resource.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <catch2/catch.hpp>

#include "streams/base/aligned_memory.h"
#include "streams/base/host_completion.h"
#include "streams/disk/mmap_allocator.h"
#include "test/streams/disk/io_testing.h"

namespace ebb {
namespace {

// Copies a block back in and compares. The memory lives until the copy is over, also where the wait is left out.
bool holds(DiskTier& tier, const Block& block, const std::vector<std::byte>& expected, const Ticket& after) {
  const c10::DataPtr back = tier.allocate(block.size());
  std::memset(back.get(), 0, block.size());  // memory that was used before may hold what is expected
  const Ticket in = tier.copy_in(back.get(), block, {WaitPoint::kCaller, after});
  tier.wait(WaitPoint::kCaller, tier.current_stream(), in);
  const bool same = block.size() == expected.size() && std::memcmp(back.get(), expected.data(), expected.size()) == 0;
  in->synchronize();
  return same;
}

std::multiset<std::string> thread_names() {
  std::multiset<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    names.insert(name);
  }
  return names;
}

// Counts what it gives out while it is c10's CPU allocator, and has no more than a TiB.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, 1); }
  ~CountingAllocator() override { c10::SetCPUAllocator(inner_, 1); }

  c10::DataPtr allocate(std::size_t bytes) override {
    struct Context {
      c10::DataPtr memory;
      CountingAllocator* counter;
    };
    TORCH_CHECK(bytes < kTiB, "no memory");
    ++live_;
    last_bytes_ = bytes;
    auto* context = new Context{inner_->allocate(bytes), this};
    return {context->memory.get(), context,
            [](void* c) {
              --static_cast<Context*>(c)->counter->live_;
              delete static_cast<Context*>(c);
            },
            c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  [[nodiscard]] int live() const { return live_; }
  [[nodiscard]] std::size_t last_bytes() const { return last_bytes_; }

 private:
  static constexpr std::size_t kTiB = std::size_t{1} << 40;

  c10::Allocator* const inner_;
  int live_ = 0;
  std::size_t last_bytes_ = 0;  // asked for
};

TEST_CASE("a disk tier brings back what it took away", "[ordering]") {
  DiskTier tier("/var/tmp", std::nullopt, each_engine());
  const std::size_t bytes = GENERATE(std::size_t{1}, std::size_t{4097}, 13 * kMiB);
  const auto content = random_bytes(bytes, 1);
  const auto block = tier.try_acquire(bytes);
  REQUIRE(block.has_value());
  CHECK(block->size() == bytes);
  const Ticket out = tier.copy_out(*block, content.data(), {});
  CHECK(holds(tier, *block, content, out));
  CHECK(tier.pool_stats().now_bytes == round_up_to_page(bytes));
}

TEST_CASE("on the CPU the compute stream is always at the point where it is") {
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  CHECK(tier.device() == c10::Device(c10::kCPU));
  CHECK(tier.current_stream() == c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU)));
  CHECK(is_done(tier.record(tier.current_stream())));
  const c10::Stream cuda(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, 0));
  CHECK_THROWS_AS(tier.record(cuda), c10::Error);
  CHECK_THROWS_AS(tier.wait(WaitPoint::kCaller, cuda, nullptr), c10::Error);
}

TEST_CASE(
    "memory to copy back to comes from the CPU allocator in force; if large it is whole pages, if small no more") {
  CountingAllocator counter;
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  constexpr std::size_t kLarge = MmapAllocator::kLeastBytes;
  const std::size_t bytes = GENERATE_COPY(std::size_t{1}, std::size_t{4096}, kLarge - 1, kLarge, kMiB + 1);
  {
    c10::DataPtr memory = tier.allocate(bytes);
    CHECK(counter.live() == 1);
    CHECK(memory.device() == c10::Device(c10::kCPU));
    if (bytes < kLarge) {
      CHECK(counter.last_bytes() == bytes);
      std::memset(memory.get(), 1, bytes);
    } else {
      CHECK(is_aligned(memory.get(), kPageBytes));
      std::memset(memory.get(), 1, round_up_to_page(bytes));
    }
    const c10::DataPtr moved = std::move(memory);
    CHECK(counter.live() == 1);
  }
  CHECK(counter.live() == 0);
  CHECK_THROWS_AS(tier.allocate(std::size_t{1} << 41), c10::OutOfMemoryError);
}

TEST_CASE("four threads offload and fetch many blocks at once through one disk tier") {
  DiskTier tier("/var/tmp", std::nullopt, each_engine());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&tier, &wrong, t] {
      std::mt19937 random(t);
      for (unsigned round = 0; round < 5; ++round) {
        std::vector<std::vector<std::byte>> contents;
        std::vector<Block> blocks;
        std::vector<Ticket> out;
        for (unsigned i = 0; i < 8; ++i) {
          contents.push_back(random_bytes(1 + random() % 300'000, t * 1000 + round * 100 + i));
          blocks.push_back(*tier.try_acquire(contents.back().size()));
          out.push_back(
              tier.copy_out(blocks.back(), contents.back().data(), {WaitPoint::kCaller, blocks.back().gates()}));
        }
        for (unsigned i = 8; i-- > 0;) {
          wrong += holds(tier, blocks[i], contents[i], out[i]) ? 0 : 1;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
  CHECK(tier.pool_stats().now_bytes == 0);
}

//   in lane   | copy_in(block) waits for a gate .............. reads the old bytes
//   out lane  |        block released, leased again, copy_out(new bytes) after block.gates()
TEST_CASE("a block that is released while it is being read is rewritten only after that read") {
  DiskTier tier("/var/tmp", kMiB, each_engine());
  const auto old_bytes = random_bytes(kMiB, 2);
  const auto new_bytes = random_bytes(kMiB, 3);
  std::optional<Block> block = tier.try_acquire(kMiB);
  tier.copy_out(*block, old_bytes.data(), {})->synchronize();

  const auto slow_reader = std::make_shared<HostCompletion>();
  const Ticket gate = slow_reader;
  std::vector<std::byte> back(kMiB);
  const Ticket in = tier.copy_in(back.data(), *block, {WaitPoint::kCaller, gate});
  block->gate(WaitPoint::kCaller, in);
  block.reset();

  std::optional<Block> reused = tier.try_acquire(kMiB);
  REQUIRE(reused.has_value());
  const Ticket out = tier.copy_out(*reused, new_bytes.data(), {WaitPoint::kCaller, reused->gates()});
  std::this_thread::sleep_for(kLongEnough);
  CHECK_FALSE(out->done());
  slow_reader->finish(nullptr);
  in->synchronize();
  CHECK(back == old_bytes);
  CHECK(holds(tier, *reused, new_bytes, out));
}

TEST_CASE("a disk tier's capacity is kept to, and is not mistaken for a full disk") {
  DiskTier tier("/var/tmp", kMiB, DiskIo::kThreads);
  const auto block = tier.try_acquire(kMiB);
  CHECK(block.has_value());
  CHECK_FALSE(tier.try_acquire(1).has_value());
  CHECK(tier.pool_stats().refusals == 0);
}

TEST_CASE("a block that the system has no room for is refused") {
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit limited = before;
  limited.rlim_cur = kMiB;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limited) == 0);
  const auto block = tier.try_acquire(2 * kMiB);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK_FALSE(block.has_value());
  CHECK(tier.pool_stats().refusals > 0);
}

TEST_CASE("a folder that does not exist is named when a disk tier is made") {
  CHECK_THROWS_WITH(DiskTier("/var/tmp/ebb-no-such-folder", std::nullopt, DiskIo::kAuto),
                    "cannot use the spill folder \"/var/tmp/ebb-no-such-folder\": No such file or directory");
}

// Shows that a wait is made however fast the disk is: the ticket is done only after the wait has begun.
TEST_CASE("only a wait for a ticket that is not done is counted as a stall", "[ordering]") {
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  const auto gate = std::make_shared<HostCompletion>();
  std::thread opener([&gate] {
    std::this_thread::sleep_for(kLongEnough);
    gate->finish(nullptr);
  });
  tier.wait(WaitPoint::kCaller, tier.current_stream(), nullptr);
  CHECK(tier.stall_stats().count == 0);
  tier.wait(WaitPoint::kCaller, tier.current_stream(), gate);
  CHECK(gate->done());
  CHECK(tier.stall_stats().count == 1);
  CHECK(tier.stall_stats().total_ms > 0);
  opener.join();
  const double stalled_ms = tier.stall_stats().total_ms;
  tier.wait(WaitPoint::kCaller, tier.current_stream(), gate);
  CHECK(tier.stall_stats().count == 1);
  CHECK(tier.stall_stats().total_ms == stalled_ms);
}

TEST_CASE("a wait for a failed copy throws what it failed with, every time") {
  DiskTier tier("/var/tmp", std::nullopt, DiskIo::kThreads);
  const auto failed = std::make_shared<HostCompletion>();
  failed->finish(std::make_exception_ptr(std::runtime_error("no more disk")));
  const auto block = tier.try_acquire(1);
  std::byte byte{};
  const Ticket gate = failed;
  const Ticket in = tier.copy_in(&byte, *block, {WaitPoint::kCaller, gate});
  CHECK_THROWS_WITH(tier.wait(WaitPoint::kCaller, tier.current_stream(), in), "no more disk");
  CHECK_THROWS_WITH(tier.wait(WaitPoint::kCaller, tier.current_stream(), in), "no more disk");
}

TEST_CASE("a disk tier may go while copies are in flight and blocks live on") {
  const auto content = random_bytes(20 * kMiB, 4);
  std::vector<Block> blocks;
  std::vector<Ticket> tickets;
  std::vector<std::byte> back(content.size());
  {
    DiskTier tier("/var/tmp", std::nullopt, each_engine());
    blocks.push_back(*tier.try_acquire(content.size()));
    tickets.push_back(tier.copy_out(blocks.back(), content.data(), {}));
    tickets.push_back(tier.copy_in(back.data(), blocks.back(), {WaitPoint::kCaller, tickets}));
    blocks.back().gate(WaitPoint::kCaller, tickets.back());
  }
  CHECK(tickets[0]->done());
  CHECK(tickets[1]->done());
  CHECK(back == content);
  blocks.clear();
}

TEST_CASE("a disk tier's threads are called ebb-out and ebb-in, and end with it") {
  const DiskIo engine = each_engine();
  {
    DiskTier tier("/var/tmp", std::nullopt, engine);
    const auto block = tier.try_acquire(1);
    std::byte byte{};
    const Ticket out = tier.copy_out(*block, &byte, {});
    tier.copy_in(&byte, *block, {WaitPoint::kCaller, out})->synchronize();  // by now both lanes run
    const auto names = thread_names();
    CHECK(names.count("ebb-out") >= 1);
    CHECK(names.count("ebb-in") >= 1);
  }
  const auto names = thread_names();
  CHECK(names.count("ebb-out") == 0);
  CHECK(names.count("ebb-in") == 0);
}

}  // namespace
}  // namespace ebb
