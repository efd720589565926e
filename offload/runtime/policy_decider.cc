#include "offload/runtime/policy_decider.h"

#include <cstdint>

#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/cache/residency.h"
#include "offload/report/summary.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/steps.h"

namespace ebb {

bool PolicyDecider::backward_begins(SavedStep& step) {
  warn_of_head(step);
  return steps().in_backward_here() == 0 &&
         steps().stall_monitor().backward_begins(residency().tier().stall_stats(), step.order_is_known());
}

// Note [The head]
// Backward wants the storages that were saved last at once, so it waits for their copies from beginning to end. A plan
// keeps these storages, as it keeps every storage whose copy in has too little time. Without a plan the user has to put
// a NoOpGuard around the head. The user is told so in the first step if the last save looks like a head's: several
// times as large as any other save.
void PolicyDecider::warn_of_head(SavedStep& step) {
  if (looked_for_head_.exchange(true)) {
    return;
  }
  constexpr std::uint64_t kTimes = 3;
  constexpr std::uint64_t kLarge = std::uint64_t{16} << 20;
  const SavedStep::LastSave last = step.last_save();
  if (last.bytes >= kLarge && last.largest_before > 0 && last.bytes >= kTimes * last.largest_before) {
    log_warning("the step's last saved tensor, of " + human_bytes(last.bytes) +
                ", is moved right before backward wants it: put a NoOpGuard around the output head and the loss.");
  }
}

std::vector<std::string> PolicyDecider::warnings(const Stats& stats) {
  const MutexLock lock(policy_mutex_);
  return ebb::warnings(stats, policy().matches());
}

}  // namespace ebb
