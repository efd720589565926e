#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "streams/base/mutex.h"

namespace ebb {

// Device memory on the CPU, for tests. Freed memory is given at once to the next request of its size on its stream,
// the last freed first, as CUDACachingAllocator does: a copy that comes too late then meets another tensor's bytes.
// Nothing returns to the system before this object ends, so that such a copy touches no memory of anybody else.
//
// Threads: every member may be called from any thread.
class SimulatedMemory {
 public:
  struct Bytes {
    std::uint64_t now = 0;   // handed out
    std::uint64_t peak = 0;  // the most that was ever handed out
  };

  SimulatedMemory() = default;
  SimulatedMemory(const SimulatedMemory&) = delete;
  SimulatedMemory& operator=(const SimulatedMemory&) = delete;

  // Aligned to 64 bytes. Memory fresh from the system is poisoned; reused memory is as its last owner left it.
  [[nodiscard]] void* take(std::size_t bytes, c10::StreamId stream);

  // Gives back memory that `take` of this object returned.
  void give(void* address) noexcept;

  // The next peak counts from the present level.
  void reset_peak();

  // Fills all bytes that `take` returned with 0xFF, which is NaN in every floating-point type.
  static void poison(void* address) noexcept;

  // How many bytes `take` was asked for.
  [[nodiscard]] static std::size_t bytes_of(void* address);

  // The object whose `take` returned this address.
  [[nodiscard]] static SimulatedMemory& owner(void* address);

  [[nodiscard]] Bytes bytes() const;

 private:
  struct Header;
  static Header& header(void* address);

  struct Free {
    void operator()(void* memory) const noexcept;
  };

  mutable Mutex mutex_;
  std::map<std::pair<c10::StreamId, std::size_t>, std::vector<void*>> free_ EBB_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<void, Free>> all_ EBB_GUARDED_BY(mutex_);
  Bytes bytes_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
