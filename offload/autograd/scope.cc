#include "offload/autograd/scope.h"

#include <tuple>
#include <utility>

#include "offload/autograd/core.h"
#include "offload/autograd/default_hooks.h"
#include "offload/autograd/early_fetch.h"
#include "offload/base/backward_pass.h"
#include "offload/residency/tape.h"

namespace ebb {

Scope::Scope(std::shared_ptr<Core> core)
    : default_hooks_around_(default_hooks_here()),
      below_(c10::ThreadLocalDebugInfo::current()),
      around_(innermost()),
      core_(std::move(core)) {}

Scope* Scope::innermost() { return static_cast<Scope*>(c10::ThreadLocalDebugInfo::get(kKind)); }

std::shared_ptr<Scope> Scope::enter(std::shared_ptr<Core> core) {
  drop_ended();
  std::shared_ptr<Scope> scope(new Scope(std::move(core)));
  c10::ThreadLocalDebugInfo::_push(kKind, scope);
  scope->with_it_ = c10::ThreadLocalDebugInfo::current().get();
  return scope;
}

void Scope::flush() {
  std::shared_ptr<Core> core;
  {
    const auto locked = lock();
    core = core_;
  }
  if (core != nullptr && !core->forked()) {
    core->tier().flush();
  }
}

void Scope::leave() {
  std::shared_ptr<Core> core;  // destroyed, as is the tape, after the lock is released
  std::shared_ptr<Tape> tape;
  {
    const auto locked = lock();
    ended_ = true;
    core = std::exchange(core_, nullptr);
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
    const auto locked = lock();
    return std::tuple(below_, around_, with_it_);
  }();
  const std::shared_ptr<Scope> kept = top->shared_from_this();
  Stack former;  // destroyed after the lock is released
  const auto locked = kept->lock();
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
      const auto locked = top->lock();
      if (!top->ended_ || c10::ThreadLocalDebugInfo::current().get() != top->with_it_) {
        return;
      }
      below = top->below_;
    }
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(below));
  }
}

// Not in a forked child, which has one thread: another one may have held the mutex when it was forked off.
std::unique_lock<std::mutex> Scope::lock() {
  return process_.forked() ? std::unique_lock(mutex_, std::defer_lock) : std::unique_lock(mutex_);
}

Scope::Target Scope::current() {
  for (Scope* scope = innermost(); scope != nullptr;) {
    const auto locked = scope->lock();
    if (!scope->ended_) {
      return default_hooks_here() > scope->default_hooks_around_ ? Target{} : Target{scope->core_, scope};
    }
    scope = scope->around_;
  }
  return {};
}

std::shared_ptr<Tape> Scope::tape(const std::shared_ptr<Core>& core) {
  // A save in the forward pass after some backward has begun is the start of the next step. One made by a backward
  // (create_graph, recomputation) stays with the step that it serves.
  const auto is_present = [this] { return tape_ != nullptr && (!tape_->in_use() || in_backward()); };
  {
    const auto locked = lock();
    if (!ended_ && is_present()) {
      return tape_;
    }
  }
  // Without the lock, under which nothing may end: the last step's guesses do, and perhaps the last step.
  std::shared_ptr<Tape> next = core->tape_of_this_thread();
  EarlyFetch::expect(core, next);
  const auto locked = lock();
  if (ended_) {  // since this save began, on another thread
    return next;
  }
  if (!is_present()) {
    std::swap(tape_, next);
  }
  return tape_;
}

}  // namespace ebb
