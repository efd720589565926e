#include "offload/steps/steps.h"

#include "offload/base/backward_pass.h"
#include "offload/steps/saved_step.h"
#include "streams/base/process_mark.h"

namespace ebb {

Steps::Steps(const Config& config)
    : limits_(config.planned ? std::unique_ptr<const StepLimits>(std::make_unique<PlannedLimits>())
                             : std::make_unique<AdaptiveLimits>(config.stash_bytes, config.window_bytes, history_,
                                                                stall_monitor_)) {}

std::shared_ptr<SavedStep> Steps::of_this_thread() {
  const std::shared_ptr<ThreadSteps> steps = threads_.here();
  if (std::shared_ptr<SavedStep> last = steps->last(); last != nullptr && !last->in_use()) {
    return last;
  }
  if (!in_backward()) {  // in a backward pass, that pass may be the one that uses the earlier steps
    for (const std::shared_ptr<SavedStep>& earlier : steps->take_prefetching()) {
      earlier->cancel_prefetches();
    }
  }
  auto step = make_shared_unless_forked<SavedStep>(history_, steps);
  steps->begin(step);
  return step;
}

std::size_t Steps::in_backward_here() { return threads_.here()->in_backward(); }

void Steps::make_room(const std::function<bool()>& enough) {
  for (const std::shared_ptr<ThreadSteps>& thread : threads_.all()) {
    for (const std::shared_ptr<SavedStep>& step : thread->take_prefetching()) {
      step->make_room(enough);
    }
  }
}

}  // namespace ebb
