#pragma once

#include <cstdint>
#include <functional>

namespace ebb {

// The owner of prefetched copies, who says how many bytes stash and window may hold.
//
// Threads: every member may be called from any thread.
class Prefetcher {
 public:
  virtual ~Prefetcher() = default;

  // The limit of the stash: sources whose copies out are under way.
  [[nodiscard]] virtual std::uint64_t stash_limit() const = 0;

  // The limit of the window: bytes that have been prefetched.
  [[nodiscard]] virtual std::uint64_t window_limit() const = 0;

  // Whether a source that a prefetch keeps for backward takes no room in the window.
  [[nodiscard]] virtual bool sources_beside_window() const = 0;

  // Cancels unclaimed prefetches, in each step the storage that is needed last first, until `enough` returns true.
  // Waits for no lock under which device memory is asked for, because the caller may hold the device allocator's lock.
  virtual void make_room(const std::function<bool()>& enough) = 0;
};

}  // namespace ebb
