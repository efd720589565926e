#include "offload/autograd/guard_scope.h"

#include <tuple>
#include <utility>

#include <ATen/SavedTensorHooks.h>

#include "offload/base/backward_pass.h"
#include "offload/guard.h"
#include "offload/managed/observed_operations.h"
#include "offload/offloader.h"
#include "offload/plans/plan_follower.h"
#include "offload/recompute/operation_log.h"
#include "offload/saving/runtime.h"
#include "offload/steps/saved_step.h"
#include "offload/tensors/deferred_copies.h"

namespace ebb {
namespace {

thread_local std::pair<std::weak_ptr<Runtime>, std::weak_ptr<SavedStep>> last_here;  // of last_saving_here()

std::size_t default_hooks_here() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

}  // namespace

GuardScope::GuardScope(std::shared_ptr<Runtime> runtime, HookOf hook_of)
    : default_hooks_around_(default_hooks_here()),
      below_(c10::ThreadLocalDebugInfo::current()),
      around_(innermost()),
      runtime_(std::move(runtime)),
      run_(hook_of == nullptr ? nullptr : std::make_shared<const HookOf>(std::move(hook_of))) {}

GuardScope* GuardScope::innermost() { return static_cast<GuardScope*>(c10::ThreadLocalDebugInfo::get(kKind)); }

std::shared_ptr<const void> GuardScope::enter(std::shared_ptr<Runtime> runtime, HookOf hook_of) {
  drop_ended();
  std::shared_ptr<OperationLog::Scope> logged;
  if (runtime != nullptr && runtime->decider().needs_recipes()) {
    observe_operations();
    logged = std::make_shared<OperationLog::Scope>();
  }
  std::shared_ptr<GuardScope> scope(new GuardScope(std::move(runtime), std::move(hook_of)));
  c10::ThreadLocalDebugInfo::_push(kKind, scope);
  {
    const LockUnlessForked locked(scope->process_, scope->mutex_);
    scope->with_it_ = c10::ThreadLocalDebugInfo::current().get();
  }
  return {scope.get(), [scope, logged](const void* /*scope*/) { scope->leave(); }};
}

void GuardScope::leave() {
  std::shared_ptr<Runtime> runtime;  // destroyed, as are the next two, after the lock is released
  std::shared_ptr<SavedStep> step;
  std::shared_ptr<const HookOf> run;
  {
    const LockUnlessForked locked(process_, mutex_);
    ended_ = true;
    runtime = std::exchange(runtime_, nullptr);
    step = std::exchange(step_, nullptr);
    run = std::exchange(run_, nullptr);
  }
  drop_ended();
  take_from_below_the_top();
  if (runtime == nullptr || runtime->forked()) {
    return;
  }
  runtime->tier().flush();
  if (PlanFollower* const plans = runtime->plans()) {
    plans->leaves().guard_ended();
  }
}

// If the stack's top scope lies directly on this scope, takes this scope out from below it.
void GuardScope::take_from_below_the_top() {
  GuardScope* const top = innermost();
  if (top == nullptr || top == this) {
    return;
  }
  const auto [below, around, with_it] = [this] {
    const LockUnlessForked locked(process_, mutex_);
    return std::tuple(below_, around_, with_it_);
  }();
  const std::shared_ptr<GuardScope> kept = top->shared_from_this();
  Stack former;  // destroyed after the lock is released
  const LockUnlessForked locked(kept->process_, kept->mutex_);
  if (kept->ended_ || kept->around_ != this || c10::ThreadLocalDebugInfo::current().get() != kept->with_it_ ||
      kept->below_.get() != with_it) {
    return;
  }
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(Stack(below));
  c10::ThreadLocalDebugInfo::_push(kKind, kept);
  former = std::exchange(kept->below_, below);
  kept->around_ = around;
  kept->with_it_ = c10::ThreadLocalDebugInfo::current().get();
}

// Takes ended scopes off the top of the calling thread's stack. An ended scope below an entry of another kind stays,
// and is passed over.
void GuardScope::drop_ended() {
  for (GuardScope* top = innermost(); top != nullptr; top = innermost()) {
    Stack below;
    {
      const LockUnlessForked locked(top->process_, top->mutex_);
      if (!top->ended_ || c10::ThreadLocalDebugInfo::current().get() != top->with_it_) {
        return;
      }
      below = top->below_;
    }
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(below));
  }
}

GuardScope::Target GuardScope::current() {
  Target target;
  bool found_guard = false;
  bool found_run = false;
  for (GuardScope* scope = innermost(); scope != nullptr && !(found_guard && found_run);) {
    const LockUnlessForked locked(scope->process_, scope->mutex_);
    bool& found = scope->run_ == nullptr ? found_guard : found_run;
    if (!scope->ended_ && !std::exchange(found, true) && default_hooks_here() <= scope->default_hooks_around_) {
      if (scope->run_ == nullptr) {
        target.runtime = scope->runtime_;
        target.scope = scope;
      } else {
        target.run = scope->run_;
      }
    }
    scope = scope->around_;
  }
  return target;
}

std::shared_ptr<SavedStep> GuardScope::step(const std::shared_ptr<Runtime>& runtime) {
  // A save in the forward pass after the step's backward has begun starts the next step. A save that a backward makes
  // (create_graph, recomputation) stays with the step that the backward serves.
  const auto is_present = [this]()
                              EBB_REQUIRES(mutex_) { return step_ != nullptr && (!step_->in_use() || in_backward()); };
  {
    const LockUnlessForked locked(process_, mutex_);
    if (!ended_ && is_present()) {
      return step_;
    }
  }
  // Called without the lock, under which nothing may be destroyed: this call ends the last step's unclaimed copies, and
  // perhaps the last step.
  std::shared_ptr<SavedStep> next = runtime->steps().of_this_thread();
  last_here = {runtime, next};
  const LockUnlessForked locked(process_, mutex_);
  if (ended_) {  // on another thread, since this save began
    return next;
  }
  if (!is_present()) {
    std::swap(step_, next);
  }
  return step_;
}

GuardScope::Saving GuardScope::last_saving_here() {
  Saving last{last_here.first.lock(), last_here.second.lock()};
  return last.runtime != nullptr && last.step != nullptr ? last : Saving{};
}

OffloadGuard::OffloadGuard(Offloader& offloader)
    : scope_(offloader.runtime() == nullptr ? nullptr : GuardScope::enter(offloader.runtime())) {}

OffloadGuard::~OffloadGuard() {
  if (scope_ != nullptr) {
    DeferredCopies::of_this_thread().start_all();
  }
}

NoOpGuard::NoOpGuard() : scope_(GuardScope::enter(nullptr)) {}

NoOpGuard::~NoOpGuard() = default;

}  // namespace ebb
