#include "offload/steps/steps.h"

#include <algorithm>

#include "offload/base/backward_pass.h"
#include "offload/steps/saved_step.h"
#include "streams/base/process_mark.h"

namespace ebb {
namespace {

// The automatic limits. On an H200, 2 GiB for each of stash and window hid every copy of a step that saves 27 GB (+0.2
// % of step time), and 1.56 GiB did not (+2.3 %). Steps that wait for copies get a larger window, which has to take the
// bytes that arrive while backward asks for nothing (Note [Before the first use] in stall_monitor.h).
constexpr std::uint64_t kShareOfStep = 12;
constexpr std::uint64_t kShareOfStepThatWaits = 6;
constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;

}  // namespace

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

std::uint64_t Steps::share(std::uint64_t of_step) const {
  return std::max(2 * history_->largest_bytes(), std::min(history_->saved_bytes() / of_step, kMostBytes));
}

std::uint64_t Steps::stash_limit() const {
  return config_.planned ? 0 : config_.stash_bytes.value_or(share(kShareOfStep));
}

std::uint64_t Steps::window_limit() const {
  return config_.planned
             ? 0
             : config_.window_bytes.value_or(share(stall_monitor_.steps_wait() ? kShareOfStepThatWaits : kShareOfStep));
}

// False if the user has set the window, whose bound then holds for everything prefetched.
bool Steps::sources_beside_window() const {
  return !config_.planned && !config_.window_bytes && stall_monitor_.steps_wait();
}

std::uint64_t Steps::stash_limit_after(SavedStep& step, std::uint32_t ordinal) const {
  if (!config_.planned) {
    return stash_limit();
  }
  const std::shared_ptr<const Plan> plan = step.plan();
  return plan == nullptr || ordinal >= plan->schedule.stash.after_save.size()
             ? 0
             : plan->schedule.stash.after_save[ordinal];
}

void Steps::make_room(const std::function<bool()>& enough) {
  for (const std::shared_ptr<ThreadSteps>& thread : threads_.all()) {
    for (const std::shared_ptr<SavedStep>& step : thread->take_prefetching()) {
      step->make_room(enough);
    }
  }
}

}  // namespace ebb
