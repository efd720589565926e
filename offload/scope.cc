#include "offload/scope.h"

#include "offload/core.h"
#include "offload/engine.h"
#include "offload/tape.h"

namespace ebb {

Scope* Scope::current() {
  auto* const scope = static_cast<Scope*>(c10::ThreadLocalDebugInfo::get(kKind));
  return scope == nullptr || scope->core_ == nullptr ? nullptr : scope;
}

std::shared_ptr<Tape> Scope::tape() {
  const std::lock_guard lock(mutex_);
  // A save in the forward pass after some backward has begun is the start of the next step. One made by a backward
  // (create_graph, recomputation) stays with the step that it serves.
  if (tape_ == nullptr || (tape_->in_use() && !in_backward())) {
    tape_ = core_->tape_of_this_thread();
  }
  return tape_;
}

}  // namespace ebb
