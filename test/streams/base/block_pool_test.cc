#include "streams/base/block_pool.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "test/streams/base/fake_backing.h"

namespace ebb {
namespace {

TEST_CASE("a block has exactly the size asked for, starts on a page and costs whole pages") {
  System system;
  const auto pool = make_pool(system);
  const auto small = pool->try_acquire(1);
  const auto page = pool->try_acquire(kPage);
  const auto more = pool->try_acquire(kPage + 1);
  CHECK(small->size() == 1);
  CHECK(page->size() == kPage);
  CHECK(more->size() == kPage + 1);
  for (const auto* block : {&small, &page, &more}) {
    CHECK((*block)->address() % kPage == 0);
  }
  CHECK(pool->stats().now_bytes == 4 * kPage);
}

TEST_CASE("a thousand blocks of 1.1 MiB fit into five percent more than their bytes") {
  constexpr std::size_t kBytes = 11 * kMiB / 10;
  System system;
  const auto pool = make_pool(system, 1000 * kBytes / 20 * 21);
  std::vector<Block> blocks;
  for (int i = 0; i < 1000; ++i) {
    auto block = pool->try_acquire(kBytes);
    REQUIRE(block.has_value());
    CHECK(block->size() == kBytes);
    blocks.push_back(*std::move(block));
  }
  CHECK(pool->stats().capacity_bytes <= 1000 * kBytes / 20 * 21);
}

TEST_CASE("a slab is a whole number of requests, a sixteenth of the capacity, from 64 MiB to 1 GiB") {
  System system;
  const auto pool = make_pool(system);
  std::vector<Block> blocks;
  const auto lease = [&](std::size_t bytes) { blocks.push_back(*pool->try_acquire(bytes)); };

  lease(3 * kMiB);
  CHECK(system.requests.back() == 66 * kMiB);  // 22 of them
  lease(200 * kMiB);
  CHECK(system.requests.back() == 200 * kMiB);
  lease(534 * kMiB);
  CHECK(system.requests.back() == 534 * kMiB);
  lease(70 * kMiB);
  CHECK(system.requests.back() == 70 * kMiB);  // 800 / 16 = 50, so 64, rounded up to 1 of them
  lease(8000 * kMiB);
  lease(300 * kMiB);
  CHECK(system.requests.back() == 600 * kMiB);  // 8870 / 16 = 554, rounded up to 2 of them
  lease(30000 * kMiB);
  lease(300 * kMiB);  // what was left of the 600
  lease(400 * kMiB);
  CHECK(system.requests.back() == 1200 * kMiB);  // 1 GiB, rounded up to 3 of them
  CHECK(pool->stats().growths == 8);
  CHECK(pool->stats().capacity_bytes == (66 + 200 + 534 + 70 + 8000 + 600 + 30000 + 1200) * kMiB);
}

TEST_CASE("the capacity is used to its last whole request, and over it there is nothing") {
  System system;
  const auto pool = make_pool(system, 10 * kMiB + 1);
  std::vector<Block> blocks;
  for (int i = 0; i < 3; ++i) {
    auto block = pool->try_acquire(3 * kMiB);
    REQUIRE(block.has_value());
    blocks.push_back(*std::move(block));
  }
  CHECK_FALSE(pool->try_acquire(3 * kMiB).has_value());
  CHECK(pool->stats().capacity_bytes == 9 * kMiB);
  CHECK(pool->try_acquire(kMiB).has_value());
  CHECK(pool->stats().capacity_bytes == 10 * kMiB);
  blocks.pop_back();
  CHECK(pool->try_acquire(3 * kMiB).has_value());
  CHECK(pool->stats().growths == 2);
}

TEST_CASE("a pool takes no more from its backing than its capacity") {
  System system;
  const auto pool = make_pool(system, 10 * kMiB);
  const auto block = pool->try_acquire(10 * kMiB);
  REQUIRE(block.has_value());
  CHECK(pool->stats().capacity_bytes == 10 * kMiB);
  CHECK_FALSE(pool->try_acquire(kPage).has_value());
}

TEST_CASE("a refused slab is tried once more with a single request") {
  System system;
  system.largest = 5 * kMiB;
  const auto pool = make_pool(system);
  CHECK(pool->try_acquire(5 * kMiB).has_value());
  CHECK(system.requests == std::vector<std::size_t>{65 * kMiB, 5 * kMiB});
  CHECK_FALSE(pool->try_acquire(6 * kMiB).has_value());
  CHECK(pool->stats().growths == 1);
  CHECK(pool->stats().capacity_bytes == 5 * kMiB);
}

TEST_CASE("zero bytes are an error and absurdly many are not to be had") {
  System system;
  const auto pool = make_pool(system);
  CHECK_THROWS_AS(pool->try_acquire(0), std::invalid_argument);
  CHECK_FALSE(make_pool(system, kMiB)->try_acquire(SIZE_MAX).has_value());
  CHECK(system.requests.empty());
}

TEST_CASE("a second round of the same blocks grows nothing and gets the same addresses") {
  System system;
  const auto pool = make_pool(system);
  const auto round = [&] {
    std::vector<Block> blocks;
    std::vector<std::uint64_t> addresses;
    for (int i = 0; i < 200; ++i) {
      blocks.push_back(*pool->try_acquire((1 + i * 37 % 11) * 700'001));
      addresses.push_back(blocks.back().address());
    }
    return addresses;
  };
  const auto first = round();
  const auto before = pool->stats();
  CHECK(before.now_bytes == 0);
  const auto second = round();
  CHECK(pool->stats().growths == before.growths);
  CHECK(pool->stats().capacity_bytes == before.capacity_bytes);
  CHECK(pool->stats().peak_bytes == before.peak_bytes);
  CHECK(round() == second);
}

TEST_CASE("a block's bytes go to the next one with the gates that are not done yet") {
  System system;
  const auto pool = make_pool(system, kMiB);
  const auto pending = std::make_shared<FakeTicket>();
  const auto finished = std::make_shared<FakeTicket>();
  const auto later = std::make_shared<FakeTicket>();
  finished->finish();
  {
    auto block = pool->try_acquire(kMiB);
    CHECK(block->gates().empty());
    block->gate(WaitPoint::kCaller, pending);
    block->gate(WaitPoint::kCaller, nullptr);
    block->gate(WaitPoint::kCaller, finished);
    block->gate(WaitPoint::kCaller, later);
    block->gate(WaitPoint::kCaller, pending);
    CHECK(block->gates() == std::vector<Ticket>{pending, later});  // what is done is forgotten
  }
  CHECK(finished.use_count() == 1);
  later->finish();
  CHECK(pool->try_acquire(kMiB / 2)->gates() == std::vector<Ticket>{pending});
  pending->finish();
  CHECK(pool->try_acquire(kMiB)->gates().empty());
}

TEST_CASE("the backing hears of bytes only when nobody uses them any more") {
  System system;
  const auto pool = make_pool(system);
  const auto pending = std::make_shared<FakeTicket>();
  std::uint64_t address = 0;
  {
    auto block = pool->try_acquire(100);
    block->gate(WaitPoint::kCaller, pending);
  }
  CHECK(system.discarded.empty());
  pending->finish();
  {
    auto block = pool->try_acquire(100);
    address = block->address();
  }
  REQUIRE(system.discarded.size() == 1);
  CHECK(system.discarded[0] == std::pair(address, kPage));
}

TEST_CASE("a moved block is given back once") {
  System system;
  const auto pool = make_pool(system);
  auto first = pool->try_acquire(kPage);
  auto second = pool->try_acquire(2 * kPage);
  const std::uint64_t address = first->address();
  std::optional<Block> moved(std::in_place, *std::move(first));
  CHECK(moved->address() == address);
  CHECK(moved->size() == kPage);
  first.reset();
  CHECK(pool->stats().now_bytes == 3 * kPage);
  *second = *std::move(moved);
  CHECK(pool->stats().now_bytes == kPage);
  moved.reset();
  CHECK(pool->stats().now_bytes == kPage);
  CHECK(second->address() == address);
  second.reset();
  CHECK(pool->stats().now_bytes == 0);
  CHECK(pool->stats().peak_bytes == 3 * kPage);
  CHECK(system.discarded.size() == 2);
}

TEST_CASE("a block keeps its pool alive, and the pool waits for its users before the backing goes", "[ordering]") {
  System system;
  const auto pending = std::make_shared<FakeTicket>();
  auto pool = make_pool(system);
  auto block = pool->try_acquire(kPage);
  pool.reset();
  CHECK_FALSE(system.gone);
  block->gate(WaitPoint::kCaller, pending);
  block.reset();
  CHECK(system.gone);
  CHECK(pending->waited());
}

TEST_CASE("a system that has refused is not asked again by every block, but is after a while") {
  System system;
  const auto pool = make_pool(system);
  system.largest = 0;
  CHECK_FALSE(pool->try_acquire(3 * kMiB));
  const std::size_t asked = system.requests.size();
  const std::uint64_t refusals = pool->stats().refusals;
  CHECK(refusals == asked);
  for (int i = 0; i < 1000; ++i) {
    CHECK_FALSE(pool->try_acquire(3 * kMiB + i));
  }
  // A machine may be so slow that a while has passed meanwhile.
  CHECK(system.requests.size() < asked + 100);
  CHECK(pool->stats().refusals == system.requests.size());
  system.largest = SIZE_MAX;
  std::this_thread::sleep_for(2 * BlockPool::kRefusalLasts);
  CHECK(pool->try_acquire(3 * kMiB));
}

TEST_CASE("a system that has refused much is asked for less") {
  System system;
  const auto pool = make_pool(system);
  system.largest = 80 * kMiB;
  CHECK_FALSE(pool->try_acquire(100 * kMiB));
  CHECK(pool->try_acquire(70 * kMiB));
}

}  // namespace
}  // namespace ebb
