#include "offload/steps/stall_monitor.h"

#include <algorithm>

namespace ebb {
namespace {

constexpr double kLeastMs = 1;  // waits of a step that are shorter count as none
constexpr int kPatience = 4;

}  // namespace

bool StallMonitor::backward_begins(const StallStats& stalls, bool expected) {
  const double ms = stalls.total_ms - seen_ms_.exchange(stalls.total_ms);
  if (!expected_.exchange(expected) || !expected) {
    return false;
  }
  patience_ = ms >= kLeastMs ? kPatience : std::max(0, patience_ - 1);
  return steps_wait();
}

void StallMonitor::early_prefetch_was_wrong() {
  expected_ = false;
  patience_ = 0;
}

}  // namespace ebb
