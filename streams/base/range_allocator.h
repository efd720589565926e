#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "streams/base/ticket.h"

namespace ebb {

// Best-fit allocator over ranges of a 64-bit address space, free neighbours merged. It hands out numbers and never
// touches memory, so one class serves pinned slabs and the spill file.
//
// Note [Gates stay with their bytes]
// Free bytes carry the tickets of their own last users, and keep them apart when ranges merge: a range that is taken
// brings the tickets of its own bytes, each once, and no others. If merging joined the tickets, one large free range
// would gather the tickets of a whole step, and every lease of the next step would wait for all of them.
//
// Threads: none of its own; the owner locks.
class RangeAllocator {
 public:
  struct Range {
    std::uint64_t address;
    std::vector<Ticket> gates;
  };

  // Adds free bytes. They merge with a free neighbour that they touch.
  // Requires bytes > 0, and that [address, address + bytes) overlaps nothing that is free.
  void add(std::uint64_t address, std::size_t bytes, std::vector<Ticket> gates);

  // Exactly `bytes` from the start of the smallest free range that fits (the lowest address among equals).
  // Requires bytes > 0.
  [[nodiscard]] std::optional<Range> take(std::size_t bytes);

  // The tickets of all free bytes, each once.
  [[nodiscard]] std::vector<Ticket> gates() const;

 private:
  // A part of a free range that somebody may still be using.
  struct Gated {
    std::uint64_t end;
    std::vector<Ticket> gates;
  };
  using Ranges = std::map<std::uint64_t, std::size_t>;  // address -> bytes

  void change(Ranges::iterator at, std::uint64_t address, std::size_t bytes) noexcept;
  void erase(Ranges::iterator at);
  [[nodiscard]] std::vector<Ticket> gates_of(std::uint64_t begin, std::uint64_t end) const;
  void drop_gates(std::uint64_t begin, std::uint64_t end) noexcept;

  Ranges ranges_;
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;  // (bytes, address) of every range
  std::map<std::uint64_t, Gated> gated_;                     // by first byte; disjoint, each inside one free range
};

}  // namespace ebb
