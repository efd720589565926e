#include "offload/backward.h"

#include <exception>

#include "offload/autograd/guard_scope.h"
#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/plans/plan_follower.h"
#include "offload/recompute/operation_log.h"
#include "offload/saving/runtime.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"
#include "offload/tensors/deferred_copies.h"
#include "offload/tensors/lent_tensor.h"

namespace ebb {

// What a pass has to end. The pass is expected to run on the last graph for which the thread began to save, for
// whichever offloader. A wrong expectation costs time only, and so does a prefetch that fails.
struct Backward::Pass {
  void begin();

  const LendingPass lending;
  GuardScope::Saving expected;  // empty unless the thread has saves that backward may use
  bool fetched = false;         // copies may have been started
  bool failed = false;
  const int exceptions = std::uncaught_exceptions();  // how many were under way when this was made
};

Backward::Backward() : pass_(std::make_unique<Pass>()) {
  if (!in_backward()) {
    try {
      pass_->begin();
    } catch (...) {  // the pass is then slower, not wrong
    }
  }
}

// Starts the first copies in before the pass asks for anything, if an early start pays (Note [Before the first use] in
// stall_monitor.h). Each step is tried once.
void Backward::Pass::begin() {
  GuardScope::Saving saving = GuardScope::last_saving_here();
  if (saving.step == nullptr || saving.runtime->forked() || saving.runtime->tier().captures()) {
    return;
  }
  saving.runtime->tier().flush();
  expected = std::move(saving);
  auto& [runtime, step] = expected;
  if (step->plan() != nullptr) {  // the plan offloads storages whose copies are deferred
    DeferredCopies::of_this_thread().start_all();
  }
  if (!step->in_use() && !step->tried_early() && runtime->decider().backward_begins(*step)) {
    fetched = true;
    step->prefetch_early(runtime->tier().current_stream(), &SavedStorage::start_prefetch);
    runtime->tier().flush();
  }
}

Backward::~Backward() {
  if (!in_backward()) {
    OperationLog::wake();
    if (OperationLog* const log = OperationLog::here(); log != nullptr && !log->is_open()) {
      log->forget();
    }
  }
  const auto& [runtime, step] = pass_->expected;
  if (runtime == nullptr || runtime->forked()) {
    return;
  }
  if (pass_->fetched && !step->in_use()) {  // backward did not run on the graph for which copies were started
    try {
      runtime->steps().stall_monitor().early_prefetch_was_wrong();
      runtime->steps().cancel_prefetches(step);
    } catch (...) {
      log_warning(
          "storages that were prefetched for another graph stay on the device until that graph is used or dropped");
    }
  }
  try {
    if (PlanFollower* const plans = runtime->plans()) {
      const bool failed = pass_->failed || std::uncaught_exceptions() > pass_->exceptions;
      plans->backward_is_over(*step, failed);
    }
  } catch (...) {
    log_warning("a step could not be recorded; the next step will be");
  }
  runtime->tier().flush();
}

void Backward::fail() { pass_->failed = true; }

}  // namespace ebb
