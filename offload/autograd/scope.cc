#include "offload/autograd/scope.h"

#include <tuple>
#include <utility>

#include "offload/autograd/default_hooks.h"
#include "offload/autograd/early_fetch.h"
#include "offload/base/backward_pass.h"
#include "offload/runtime/runtime.h"
#include "offload/steps/tape.h"

namespace ebb {

Scope::Scope(std::shared_ptr<Runtime> runtime)
    : default_hooks_around_(default_hooks_here()),
      below_(c10::ThreadLocalDebugInfo::current()),
      around_(innermost()),
      runtime_(std::move(runtime)) {}

Scope* Scope::innermost() { return static_cast<Scope*>(c10::ThreadLocalDebugInfo::get(kKind)); }

std::shared_ptr<Scope> Scope::enter(std::shared_ptr<Runtime> runtime) {
  drop_ended();
  std::shared_ptr<Scope> scope(new Scope(std::move(runtime)));
  c10::ThreadLocalDebugInfo::_push(kKind, scope);
  const LockUnlessForked locked(scope->process_, scope->mutex_);
  scope->with_it_ = c10::ThreadLocalDebugInfo::current().get();
  return scope;
}

void Scope::flush() {
  std::shared_ptr<Runtime> runtime;
  {
    const LockUnlessForked locked(process_, mutex_);
    runtime = runtime_;
  }
  if (runtime != nullptr && !runtime->forked()) {
    runtime->tier().flush();
  }
}

void Scope::leave() {
  std::shared_ptr<Runtime> runtime;  // destroyed, as is the tape, after the lock is released
  std::shared_ptr<Tape> tape;
  {
    const LockUnlessForked locked(process_, mutex_);
    ended_ = true;
    runtime = std::exchange(runtime_, nullptr);
    tape = std::exchange(tape_, nullptr);
  }
  drop_ended();
  take_from_below_the_top();
}

// Has the scope on top lie on what is below this one, if it lies on this one.
void Scope::take_from_below_the_top() {
  Scope* const top = innermost();
  if (top == nullptr || top == this) {
    return;
  }
  const auto [below, around, with_it] = [this] {
    const LockUnlessForked locked(process_, mutex_);
    return std::tuple(below_, around_, with_it_);
  }();
  const std::shared_ptr<Scope> kept = top->shared_from_this();
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

// Not more than what is on top: below other people's information a scope stays, and is passed over.
void Scope::drop_ended() {
  for (Scope* top = innermost(); top != nullptr; top = innermost()) {
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

Scope::Target Scope::current() {
  for (Scope* scope = innermost(); scope != nullptr;) {
    const LockUnlessForked locked(scope->process_, scope->mutex_);
    if (!scope->ended_) {
      return default_hooks_here() > scope->default_hooks_around_ ? Target{} : Target{scope->runtime_, scope};
    }
    scope = scope->around_;
  }
  return {};
}

std::shared_ptr<Tape> Scope::tape(const std::shared_ptr<Runtime>& runtime) {
  // A save in the forward pass after some backward has begun is the start of the next step. One made by a backward
  // (create_graph, recomputation) stays with the step that it serves.
  const auto is_present = [this]()
                              EBB_REQUIRES(mutex_) { return tape_ != nullptr && (!tape_->in_use() || in_backward()); };
  {
    const LockUnlessForked locked(process_, mutex_);
    if (!ended_ && is_present()) {
      return tape_;
    }
  }
  // Without the lock, under which nothing may end: the last step's guesses do, and perhaps the last step.
  std::shared_ptr<Tape> next = runtime->steps().of_this_thread();
  EarlyFetch::expect(runtime, next);
  const LockUnlessForked locked(process_, mutex_);
  if (ended_) {  // since this save began, on another thread
    return next;
  }
  if (!is_present()) {
    std::swap(tape_, next);
  }
  return tape_;
}

}  // namespace ebb
