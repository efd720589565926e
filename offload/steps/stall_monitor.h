#pragma once

#include <atomic>

#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// Whether steps wait for copies.
//
// Note [Before the first use]
// Backward often begins with what was not moved, an output head say, and asks for nothing meanwhile; then the link is
// idle. (With Llama-3-8B's shape in bfloat16, 9 layers, that is 34 of 472 ms on an H200.) So where steps wait for
// copies anyway, the first copies in start as soon as backward begins, before it has asked for anything. Not where they
// do not: what is fetched early takes room where a step often has its peak, in the head's backward.
//
// Threads: every member may be called from any thread.
class StallMonitor {
 public:
  // A backward begins. `stalls`: the tier's. `expected`: whether its order of use is known; until then waiting teaches
  // nothing. Whether one of the last few steps waited.
  bool backward_begins(const StallStats& stalls, bool expected);

  [[nodiscard]] bool steps_wait() const { return patience_ > 0; }

  // What was started early was for another graph than the one that backward ran on. Steps are then taken not to wait
  // until they have again, or wrong guesses, which make streams wait, would bring forth more of them.
  void early_prefetch_was_wrong();

 private:
  Mutex mutex_;
  double seen_ms_ EBB_GUARDED_BY(mutex_) = 0;
  bool expected_ EBB_GUARDED_BY(mutex_) = false;  // the last one
  std::atomic<int> patience_{0};                  // backwards without a stall until steps are taken not to wait
};

}  // namespace ebb
