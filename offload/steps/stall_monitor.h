#pragma once

#include <atomic>

#include "streams/base/tier.h"

namespace ebb {

// Whether steps wait for copies.
//
// Note [Before the first use]
// Backward often begins with operations whose saves were kept, an output head say, and asks for no offloaded storage
// meanwhile, so the link is idle. (With Llama-3-8B's shape in bfloat16, 9 layers, the link is idle for 34 of 472 ms on
// an H200.) So where steps wait for copies, the first copies in start as soon as backward begins, before it has asked
// for anything. Where steps do not wait, no copy starts that early: the fetched bytes would take memory in the head's
// backward, where a step often has its peak.
//
// Threads: every member may be called from any thread. Two backward passes that begin at once may teach a little less.
class StallMonitor {
 public:
  // Notes that a backward begins, and returns whether one of the last few steps waited for copies. `stalls`: the tier's
  // present figures. `expected`: whether the access order of this backward is known; waits of a backward whose order
  // was not known teach nothing.
  bool backward_begins(const StallStats& stalls, bool expected);

  [[nodiscard]] bool steps_wait() const { return patience_ > 0; }

  // Notes that early prefetches were for another graph than the one that backward ran on. Steps are then taken not to
  // wait until a later step waits. Otherwise the waits that wrong prefetches cause would bring forth more early
  // prefetches.
  void early_prefetch_was_wrong();

 private:
  std::atomic<double> seen_ms_{0};
  std::atomic<bool> expected_{false};  // of the last backward that began
  std::atomic<int> patience_{0};       // how many more backwards without waits until steps are taken not to wait
};

}  // namespace ebb
