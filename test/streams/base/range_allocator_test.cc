#include "streams/base/range_allocator.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <catch2/catch.hpp>

namespace ebb {
namespace {

class NeverDone final : public Completion {
 public:
  [[nodiscard]] bool done() const noexcept override { return false; }
  void synchronize() const override {}
};

Ticket make_ticket() { return std::make_shared<NeverDone>(); }

using Tickets = std::vector<Ticket>;

std::set<Ticket> as_set(const Tickets& tickets) { return {tickets.begin(), tickets.end()}; }

TEST_CASE("a take gets the smallest range that fits, and the lowest address among equals") {
  RangeAllocator ranges;
  ranges.add(1000, 50, {});
  ranges.add(3000, 20, {});
  ranges.add(2000, 20, {});
  ranges.add(4000, 10, {});

  CHECK(ranges.take(15)->address == 2000);
  CHECK(ranges.take(20)->address == 3000);
  CHECK(ranges.take(10)->address == 4000);
  CHECK(ranges.take(6)->address == 1000);
  CHECK(ranges.take(5)->address == 2015);
  CHECK_FALSE(ranges.take(45).has_value());
  CHECK(ranges.take(44).has_value());
}

TEST_CASE("neighbours merge in every order of release") {
  std::vector<std::uint64_t> addresses{0, 10, 20};
  do {
    RangeAllocator ranges;
    for (const std::uint64_t address : addresses) {
      ranges.add(address, 10, {});
    }
    CHECK(ranges.take(30)->address == 0);
  } while (std::next_permutation(addresses.begin(), addresses.end()));
}

TEST_CASE("ranges that do not touch stay apart") {
  RangeAllocator ranges;
  ranges.add(0, 10, {});
  ranges.add(11, 10, {});
  CHECK_FALSE(ranges.take(11).has_value());
}

TEST_CASE("a range made of several brings the tickets of all of them, each once") {
  const Ticket first = make_ticket();
  const Ticket second = make_ticket();
  const Ticket both = make_ticket();
  RangeAllocator ranges;
  ranges.add(0, 10, {first, both});
  ranges.add(10, 10, {});
  ranges.add(20, 10, {second, both, nullptr});

  CHECK(as_set(ranges.gates()) == std::set<Ticket>{first, second, both});
  const Tickets gates = ranges.take(30)->gates;
  CHECK(gates.size() == 3);
  CHECK(as_set(gates) == std::set<Ticket>{first, second, both});
  CHECK(ranges.gates().empty());
}

TEST_CASE("every piece of a split range brings the range's tickets") {
  const Ticket user = make_ticket();
  RangeAllocator ranges;
  ranges.add(0, 30, {user});
  for (int piece = 0; piece < 3; ++piece) {
    CHECK(ranges.take(10)->gates == Tickets{user});
  }
}

TEST_CASE("a range taken out of merged ones brings no ticket of bytes outside it") {
  const Ticket first = make_ticket();
  const Ticket second = make_ticket();
  RangeAllocator ranges;
  ranges.add(0, 10, {first});
  ranges.add(10, 10, {second});
  CHECK(ranges.take(10)->gates == Tickets{first});
  CHECK(ranges.take(5)->gates == Tickets{second});
  CHECK(ranges.take(5)->gates == Tickets{second});
}

// The model keeps, for every byte of a small address space, whether it is free and who used it last.
TEST_CASE("any sequence of takes and releases agrees with a byte-by-byte model") {
  constexpr std::size_t kBytes = 200;
  const std::uint32_t seed = GENERATE(range(1U, 31U));
  CAPTURE(seed);
  std::mt19937 random(seed);

  RangeAllocator ranges;
  std::vector<bool> free(kBytes, true);
  std::vector<Ticket> user(kBytes);
  std::map<std::uint64_t, std::size_t> taken;
  ranges.add(0, kBytes, {});

  const auto best_fit = [&](std::size_t bytes) -> std::optional<std::uint64_t> {
    std::optional<std::uint64_t> best;
    std::size_t best_length = kBytes + 1;
    for (std::size_t begin = 0; begin < kBytes;) {
      std::size_t end = begin;
      while (end < kBytes && free[end]) {
        ++end;
      }
      if (end - begin >= bytes && end - begin < best_length) {
        best = begin;
        best_length = end - begin;
      }
      begin = end + 1;
    }
    return best;
  };

  for (int round = 0; round < 400; ++round) {
    if (random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % 40;
      const std::optional<std::uint64_t> expected = best_fit(bytes);
      const std::optional<RangeAllocator::Range> got = ranges.take(bytes);
      REQUIRE(got.has_value() == expected.has_value());
      if (got) {
        REQUIRE(got->address == *expected);
        std::set<Ticket> users;
        for (std::size_t byte = got->address; byte < got->address + bytes; ++byte) {
          free[byte] = false;
          if (user[byte] != nullptr) {
            users.insert(user[byte]);
          }
        }
        REQUIRE(got->gates.size() == users.size());
        REQUIRE(as_set(got->gates) == users);
        taken.emplace(got->address, bytes);
      }
    } else if (!taken.empty()) {
      const auto [address, bytes] = *std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
      taken.erase(address);
      const Ticket ticket = random() % 3 == 0 ? nullptr : make_ticket();
      std::fill_n(free.begin() + static_cast<std::ptrdiff_t>(address), bytes, true);
      std::fill_n(user.begin() + static_cast<std::ptrdiff_t>(address), bytes, ticket);
      ranges.add(address, bytes, ticket == nullptr ? Tickets{} : Tickets{ticket});
    }
  }
}

}  // namespace
}  // namespace ebb
