// The pool under random and concurrent use.

#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <catch2/catch.hpp>

#include "streams/base/block_pool.h"
#include "test/streams/base/fake_backing.h"

namespace ebb {
namespace {

TEST_CASE("blocks that live at once never overlap and the counts agree, whatever comes and goes") {
  const std::uint32_t seed = GENERATE(range(1U, 11U));
  CAPTURE(seed);
  std::mt19937 random(seed);
  System system;
  const auto pool = make_pool(system, 200 * kMiB);
  std::map<std::uint64_t, Block> live;
  std::uint64_t bytes_live = 0;
  const auto pages = [](const Block& block) { return (block.size() + kPage - 1) / kPage * kPage; };

  for (int round = 0; round < 2000; ++round) {
    if (random() % 5 < 3) {
      auto block = pool->try_acquire(1 + random() % (4 * kMiB));
      if (block) {
        const auto next = live.lower_bound(block->address());
        REQUIRE((next == live.end() || block->address() + pages(*block) <= next->first));
        if (next != live.begin()) {
          const auto previous = std::prev(next);
          REQUIRE(previous->first + pages(previous->second) <= block->address());
        }
        bytes_live += pages(*block);
        const std::uint64_t address = block->address();
        live.emplace(address, *std::move(block));
      }
    } else if (!live.empty()) {
      const auto at = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      bytes_live -= pages(at->second);
      live.erase(at);
    }
    REQUIRE(pool->stats().now_bytes == bytes_live);
    REQUIRE(pool->stats().capacity_bytes <= 200 * kMiB);
  }
  live.clear();
  CHECK(pool->stats().now_bytes == 0);
}

TEST_CASE("threads that lease at once never share a byte") {
  constexpr int kThreads = 2;
  System system;
  const auto pool = make_pool(system, 300 * kMiB);
  // One owner for each page that the pool can give: 0 is nobody.
  std::vector<std::atomic<int>> owner(400 * kMiB / kPage);
  std::atomic<bool> shared = false;
  std::atomic<int> leases = 0;

  const auto work = [&](int self) {
    std::mt19937 random(static_cast<std::uint32_t>(self));
    const auto claim = [&](const Block& block, int from, int to) {
      for (std::uint64_t page = block.address() / kPage; page * kPage < block.address() + block.size(); ++page) {
        int expected = from;
        if (!owner[page].compare_exchange_strong(expected, to)) {
          shared = true;
        }
      }
    };
    std::vector<Block> mine;
    for (int round = 0; round < 3000; ++round) {
      if (random() % 2 == 0) {
        if (auto block = pool->try_acquire(1 + random() % (2 * kMiB))) {
          claim(*block, 0, self);
          mine.push_back(*std::move(block));
          ++leases;
        }
      } else if (!mine.empty()) {
        std::swap(mine[random() % mine.size()], mine.back());
        claim(mine.back(), self, 0);
        mine.pop_back();
      }
    }
    for (const Block& block : mine) {
      claim(block, self, 0);
    }
  };

  std::vector<std::thread> threads;
  for (int self = 1; self <= kThreads; ++self) {
    threads.emplace_back(work, self);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_FALSE(shared);
  CHECK(leases > 1000);
  CHECK(pool->stats().now_bytes == 0);
}

}  // namespace
}  // namespace ebb
