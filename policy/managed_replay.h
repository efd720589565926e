#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "policy/managed_use.h"

namespace ebb {

// Plays through periods of uses that come again and again, where at most `limit` bytes of managed storages are on the
// device; the storages of one operation are there at once, whatever the limit is. Belady's rule decides what leaves:
// what is used last of all. Source of the rule: L. A. Belady, "A study of replacement algorithms for a virtual-storage
// computer", IBM Systems Journal 5 (2), 1966.
//
// `uses` outlives the object, and observers are given references to its elements.
class ManagedReplay {
 public:
  // Is told what happens, in order. Operations are counted from the first period's first, which is 0.
  class Observer {
   public:
    Observer() = default;
    Observer(const Observer&) = delete;
    Observer& operator=(const Observer&) = delete;
    virtual ~Observer() = default;

    // So many bytes are on the device in these phases, and in those between them.
    virtual void hold(Phase /*from*/, Phase /*to*/, std::uint64_t /*bytes*/) {}
    virtual void begin_operation(const ManagedUse& /*first*/) {}
    virtual void fetch(const ManagedUse& /*use*/) {}
    virtual void make(const ManagedUse& /*use*/) {}  // a new storage, in the operation
    // Makes room for a use in the present operation. `last_operation`: the last one that used the storage that leaves.
    virtual void leave(const ManagedUse& /*for_use*/, std::uint64_t /*bytes*/, bool /*written*/,
                       std::size_t /*last_operation*/) {}
    virtual void end_storage(std::uint64_t /*bytes*/) {}  // after its last use, in the present operation
  };

  ManagedReplay(std::span<const ManagedUse> uses, std::uint64_t limit)
      : uses_(uses), limit_(limit), next_(next_uses()) {}

  // Takes time in proportion to n log n, n being the number of uses. The first period begins with an empty device.
  void pass_period(Observer& observer);

 private:
  using Place = std::size_t;  // counts uses from the first period's beginning

  struct There {
    std::uint64_t bytes;
    Place next;             // the next use
    std::size_t operation;  // the last one that used the storage
    bool written;
  };

  [[nodiscard]] std::vector<std::size_t> next_uses() const;
  void use(std::size_t i, Observer& observer);
  void make_room(const ManagedUse& use, Observer& observer);
  void forget(std::unordered_map<std::uint32_t, There>::iterator there);

  const std::span<const ManagedUse> uses_;
  const std::uint64_t limit_;
  const std::vector<std::size_t> next_;  // how many uses later the same item is used next
  std::unordered_map<std::uint32_t, There> there_;
  std::set<std::pair<Place, std::uint32_t>> order_;      // by next use: what may leave
  std::vector<std::pair<Place, std::uint32_t>> in_use_;  // of the present operation, which may not
  std::uint64_t held_ = 0;
  Place begin_ = 0;             // of the period
  std::size_t operations_ = 0;  // that have begun
};

}  // namespace ebb
