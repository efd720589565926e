#include "offload/steps/stall_monitor.h"

#include <utility>

namespace ebb {
namespace {

constexpr double kLeastMs = 1;  // waits of a step that are shorter count as none
constexpr int kPatience = 4;

}  // namespace

bool StallMonitor::backward_begins(const StallStats& stalls, bool expected) {
  const MutexLock lock(mutex_);
  const double ms = stalls.total_ms - std::exchange(seen_ms_, stalls.total_ms);
  if (!std::exchange(expected_, expected) || !expected) {
    return false;
  }
  if (ms >= kLeastMs) {
    patience_ = kPatience;
  } else if (patience_ > 0) {
    --patience_;
  }
  return steps_wait();
}

void StallMonitor::early_prefetch_was_wrong() {
  const MutexLock lock(mutex_);
  expected_ = false;
  patience_ = 0;
}

}  // namespace ebb
