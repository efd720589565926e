#pragma once

#include <cstdint>

namespace ebb {

// How many bytes stash and window may hold.
//
// Threads: every member may be called from any thread.
class StagingLimits {
 public:
  virtual ~StagingLimits() = default;

  // The limit of the stash: sources whose copies out are under way.
  [[nodiscard]] virtual std::uint64_t stash() const = 0;

  // The limit of the window: bytes that have been prefetched.
  [[nodiscard]] virtual std::uint64_t window() const = 0;

  // Whether a source that a prefetch keeps for backward takes no room in the window.
  [[nodiscard]] virtual bool sources_beside_window() const = 0;
};

}  // namespace ebb
