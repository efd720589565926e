#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace ebb {

// Bytes that backward will want back, as a step sees them.
//
// Threads: every member may be called from any thread.
class Prefetchable {
 public:
  virtual ~Prefetchable() = default;

  // Starts the copy in before anybody asks, if there is room. False: no room, or the copy cannot start; it is tried
  // again when somebody asks. `held_bytes`: with a plan, the most that ebb may then hold on the device, instead of the
  // window.
  virtual bool prefetch(std::optional<std::uint64_t> held_bytes) = 0;

  // Gives up a copy in for which nobody has asked, nor is just about to. Waits for no lock under which device memory is
  // asked for: whoever calls this may hold the device allocator's.
  virtual void cancel_prefetch() = 0;
};

// Who prefetches, as far as eviction has to know.
//
// Threads: every member may be called from any thread.
class Prefetcher {
 public:
  virtual ~Prefetcher() = default;

  // Gives up what was prefetched and nobody has asked for, what is needed last first, until it is enough. Waits for no
  // lock under which device memory is asked for: whoever calls this may hold the device allocator's.
  virtual void make_room(const std::function<bool()>& enough) = 0;
};

}  // namespace ebb
