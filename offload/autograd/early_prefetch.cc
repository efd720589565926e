#include "offload/autograd/early_prefetch.h"

#include <exception>

#include "offload/base/log.h"
#include "offload/plans/plan_follower.h"
#include "offload/saving/runtime.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"
#include "offload/tensors/deferred_copies.h"

namespace ebb {
namespace {

struct Expected {
  std::weak_ptr<Runtime> runtime;
  std::weak_ptr<SavedStep> step;
};

Expected& expected_here() {
  thread_local Expected expected;
  return expected;
}

}  // namespace

void EarlyPrefetch::expect(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<SavedStep>& step) {
  expected_here() = {runtime, step};
}

EarlyPrefetch::EarlyPrefetch() noexcept : exceptions_(std::uncaught_exceptions()) {
  try {
    start();
  } catch (...) {  // the pass is then slower, not wrong
  }
}

void EarlyPrefetch::start() {
  const Expected& expected = expected_here();
  std::shared_ptr<Runtime> runtime = expected.runtime.lock();
  std::shared_ptr<SavedStep> step = expected.step.lock();
  if (runtime == nullptr || step == nullptr || runtime->forked() || runtime->tier().captures()) {
    return;
  }
  runtime->tier().flush();
  runtime_ = std::move(runtime);
  step_ = std::move(step);
  if (step_->plan() != nullptr) {  // the plan offloads storages whose copies are deferred
    DeferredCopies::of_this_thread().start_all();
  }
  if (!step_->in_use() && !step_->tried_early() && runtime_->decider().backward_begins(*step_)) {
    fetched_ = true;
    step_->prefetch_early(runtime_->tier().current_stream(), &SavedStorage::start_prefetch);
    runtime_->tier().flush();
  }
}

EarlyPrefetch::~EarlyPrefetch() {
  if (runtime_ == nullptr || runtime_->forked()) {
    return;
  }
  if (fetched_ && !step_->in_use()) {
    try {
      runtime_->steps().stall_monitor().early_prefetch_was_wrong();
      runtime_->steps().cancel_prefetches(step_);
    } catch (...) {
      log_warning(
          "storages that were prefetched for another graph stay on the device until that graph is used or dropped");
    }
  }
  try {
    if (PlanFollower* const plans = runtime_->plans()) {
      plans->backward_is_over(*step_, /*failed=*/failed_ || std::uncaught_exceptions() > exceptions_);
    }
  } catch (...) {
    log_warning("a step could not be recorded; the next step will be");
  }
  runtime_->tier().flush();
}

}  // namespace ebb
