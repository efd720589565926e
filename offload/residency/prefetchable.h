#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace ebb {

// Offloaded bytes that backward will need, as a step sees them.
//
// Threads: every member may be called from any thread.
class Prefetchable {
 public:
  virtual ~Prefetchable() = default;

  // Starts the copy in before backward asks for the bytes, if the window has room. `held_bytes`: with a plan, the most
  // bytes that ebb may hold on the device with this copy, without what recipes and second runs of regions have made;
  // this bound then takes the place of the window's. Returns false if there is no room or the copy cannot be started;
  // backward then fetches the bytes when it asks for them. If the source is still alive, and the bound of the sources
  // that ebb keeps for backward is reached, the call returns true and keeps nothing: the source may still be alive when
  // backward asks.
  virtual bool prefetch(std::optional<std::uint64_t> held_bytes) = 0;

  // Cancels an unclaimed prefetch, unless another thread is just about to use the copy. Waits for no lock under which
  // device memory is asked for, because the caller may hold the device allocator's lock.
  virtual void cancel_prefetch() = 0;
};

// The owner of prefetched copies, as eviction sees it.
//
// Threads: every member may be called from any thread.
class Prefetcher {
 public:
  virtual ~Prefetcher() = default;

  // Cancels unclaimed prefetches, in each step the storage that is needed last first, until `enough` returns true.
  // Waits for no lock under which device memory is asked for, because the caller may hold the device allocator's lock.
  virtual void make_room(const std::function<bool()>& enough) = 0;
};

}  // namespace ebb
