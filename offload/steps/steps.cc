#include "offload/steps/steps.h"

#include <algorithm>

#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"
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

Steps::OfThread& Steps::here_locked() {
  const std::thread::id thread = std::this_thread::get_id();
  if (const auto known = threads_.find(thread); known != threads_.end()) {
    return known->second;
  }
  if (threads_.size() >= next_cleaning_) {
    std::erase_if(threads_, [](const auto& each) {
      return each.second.in_backward.use_count() == 1 && each.second.last.expired();
    });
    next_cleaning_ = std::max<std::size_t>(64, 2 * threads_.size());
  }
  return threads_[thread];
}

std::shared_ptr<SavedStep> Steps::of_this_thread() {
  std::shared_ptr<BackwardCount> thread;
  std::shared_ptr<SavedStep> last;
  {
    const MutexLock lock(mutex_);
    const OfThread& here = here_locked();
    thread = here.in_backward;
    last = here.last.lock();
  }
  if (last != nullptr && !last->in_use()) {
    return last;
  }
  if (!in_backward()) {  // in a backward pass, that pass may be the one that uses the earlier steps
    cancel(eviction_queue_.take_copies_of(*thread));
  }
  auto step = make_shared_unless_forked<SavedStep>(history_, std::move(thread));
  const MutexLock lock(mutex_);
  here_locked().last = step;
  return step;
}

std::size_t Steps::in_backward_here() {
  const MutexLock lock(mutex_);
  return *here_locked().in_backward;
}

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

void Steps::cancel(const std::vector<EvictionQueue::Copy>& copies, bool device_is_full) {
  for (const EvictionQueue::Copy& each : copies) {
    if (const std::shared_ptr<SavedStep> step = each.step.lock()) {
      step->prefetch_is_cancelled(device_is_full);
    }
    if (const std::shared_ptr<SavedStorage> storage = each.storage.lock()) {
      storage->cancel_prefetch();
    }
  }
}

void Steps::make_room(const std::function<bool()>& enough) {
  while (!enough()) {
    const std::vector<EvictionQueue::Copy> last = eviction_queue_.take_last_copy();
    if (last.empty()) {
      return;
    }
    cancel(last, /*device_is_full=*/true);
  }
}

void Steps::evict(const std::function<bool()>& enough) {
  EvictionQueue::Id from = 0;
  while (!enough()) {
    const std::optional<EvictionQueue::Kept> kept = eviction_queue_.first_kept(from);
    if (!kept) {
      return;
    }
    from = kept->id + 1;
    try {
      static_cast<void>(kept->storage->evict(kept->stream));
    } catch (...) {
      log_warning("a tensor that was kept could not be moved to make room on the device");
    }
  }
}

}  // namespace ebb
