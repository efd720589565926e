#pragma once

#include <c10/core/Stream.h>

namespace ebb {

// A storage that may be evicted when the device is full.
//
// Threads: every member may be called from any thread.
class Evictable {
 public:
  virtual ~Evictable() = default;

  // Copies the bytes out. `stream`: the stream that made the bytes; this stream is made to wait for the copy, so that
  // the memory can be let go at once. Returns false, and does nothing, where somebody else uses the memory or the tier
  // has no room. Throws the tier's error if the copy cannot be started. Waits for no lock under which device memory is
  // asked for, because the caller may hold the device allocator's lock.
  [[nodiscard]] virtual bool evict(c10::Stream stream) = 0;
};

}  // namespace ebb
