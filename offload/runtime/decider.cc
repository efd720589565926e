#include "offload/runtime/decider.h"

#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>

#include "offload/cache/residency.h"
#include "offload/recompute/graph_recipe.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/steps.h"

namespace ebb {
namespace {

// The decider whose policy the calling thread runs; null for none.
thread_local const Decider* asking_here = nullptr;

}  // namespace

Decider::Decider(std::shared_ptr<Policy> policy, Steps& steps, Residency& residency)
    : policy_(std::move(policy)),
      steps_(steps),
      residency_(residency),
      needs_operation_(policy_->needs_operation()),
      needs_recipes_(policy_->needs_recompute()),
      least_bytes_(policy_->least_bytes()) {}

Decision Decider::decide(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step, const GraphRecipe* recipe) {
  Candidate candidate;
  candidate.bytes = tensor.storage().nbytes();
  std::string operation;
  if (needs_operation_) {
    if (const auto& grad_fn = tensor.grad_fn()) {
      operation = grad_fn->name();
    }
    candidate.operation = operation;
  }
  candidate.recompute = recipe == nullptr ? Recompute::kNo : recipe->cost();
  Decision decision{};
  {
    TORCH_CHECK(asking_here != this,
                "ebb: a policy ran an operation that autograd saves tensors of, under the guard of the offloader that "
                "asked the policy. Put a NoOpGuard around the operation.");
    const MutexLock lock(policy_mutex_);
    decision = ask_locked(candidate, step);
    enter_locked(tensor, saved, step, recipe, candidate);
  }
  decided(step, static_cast<std::uint32_t>(candidate.ordinal));
  return decision;
}

Decision Decider::ask_locked(Candidate& candidate, SavedStep& step) {
  const Decider* const before = std::exchange(asking_here, this);
  const auto over = c10::make_scope_exit([before] { asking_here = before; });
  candidate.ordinal = step.next_candidate();
  if (candidate.ordinal == 0) {
    if (steps_.history().take_dropped()) {
      policy_->drop_step();
    }
    policy_->begin_step();
    ++residency_.ledger().counters().steps;
    step_begins_locked(step);
  }
  const Decision decision = policy_->decide(candidate);
  decided_locked(step);
  return decision;
}

}  // namespace ebb
