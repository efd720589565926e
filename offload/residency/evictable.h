#pragma once

#include <c10/core/Stream.h>

namespace ebb {

// What may be copied out when the device is full.
//
// Threads: every member may be called from any thread.
class Evictable {
 public:
  virtual ~Evictable() = default;

  // Copies the bytes out. `stream`: the one that made the bytes, and which is made to wait for the copy, so that the
  // memory can be let go at once. False, and nothing done, where somebody else uses the memory, or there is no room for
  // the copy. Throws what the tier throws that cannot start the copy. Waits for no lock under which device memory is
  // asked for: whoever calls this may hold the device allocator's.
  [[nodiscard]] virtual bool evict(c10::Stream stream) = 0;
};

}  // namespace ebb
