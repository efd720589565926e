#pragma once

#include <cstdint>

namespace ebb {

// How many bytes stash and window may hold.
//
// Threads: every member may be called from any thread.
class StagingLimits {
 public:
  virtual ~StagingLimits() = default;

  // Of sources whose copies out are under way.
  [[nodiscard]] virtual std::uint64_t stash() const = 0;

  // Of what is prefetched.
  [[nodiscard]] virtual std::uint64_t window() const = 0;

  // Whether sources that are kept for backward take no room in the window.
  [[nodiscard]] virtual bool sources_beside_window() const = 0;
};

}  // namespace ebb
