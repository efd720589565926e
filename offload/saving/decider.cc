#include "offload/saving/decider.h"

#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/hash.h>
#include <torch/csrc/autograd/function.h>

#include "offload/accounts/summary.h"
#include "offload/base/backward_pass.h"
#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/cache/residency.h"
#include "offload/plans/plan_follower.h"
#include "offload/recompute/log_recipe.h"
#include "offload/recording/step_recorder.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/steps.h"
#include "policy/policies.h"

namespace ebb {
namespace {

// The decider whose policy the calling thread runs; null for none.
thread_local const Decider* asking_here = nullptr;

constexpr std::size_t kMostProofs = std::size_t{1} << 16;  // which then are all forgotten

}  // namespace

Decider::Decider(const Options& options, Steps& steps, Residency& residency)
    : steps_(steps),
      residency_(residency),
      plans_(options.device_budget ? std::make_unique<PlanFollower>(options, steps, residency) : nullptr),
      policy_(options.device_budget       ? nullptr
              : options.policy != nullptr ? options.policy
                                          : minimum_size(kDefaultMinimumBytes)),
      needs_operation_(policy_ == nullptr || policy_->needs_operation()),
      needs_recipes_(policy_ == nullptr || policy_->needs_recompute()),
      least_bytes_(policy_ == nullptr ? options.planned_minimum_bytes : policy_->least_bytes()) {}

Decider::~Decider() = default;

Decider::Decided Decider::decide(const at::Tensor& tensor, const std::shared_ptr<SavedStorage>& saved, SavedStep& step,
                                 const MakeRecipe& make_recipe, const LogRecipe::SaveValue& save_value) {
  const OperationLog* const log = OperationLog::here();
  const ValueId value = log == nullptr ? kNoValue : log->value_of(tensor);
  if (const auto asked = log == nullptr ? std::nullopt : log->asked_about(value, step)) {
    if (plans_ != nullptr) {
      plans_->saved_later(asked->ordinal);
    }
    const auto find = [&] {
      const bool may_be_made = make_recipe == nullptr && log->sees() && !in_backward();
      return may_be_made ? LogRecipe::find(*log, tensor, least_bytes_) : nullptr;
    };
    return decide_as_asked(value, *asked, saved, find, save_value);
  }
  Candidate candidate{.bytes = tensor.storage().nbytes(), .operation = {}};
  std::string operation;
  if (needs_operation_) {
    if (const auto& grad_fn = tensor.grad_fn()) {
      operation = grad_fn->name();
    } else if (make_recipe != nullptr) {
      operation = "in a checkpointed region";
    }
    candidate.operation = operation;
  }
  if (plans_ != nullptr && plans_->rests(candidate, step, /*has_recipes=*/!OperationLog::is_at_rest())) {
    OperationLog::rest();
    return {.decision = Decision::kKeep, .found = {}};
  }
  Found found = find_recipe(tensor, step, make_recipe, save_value);
  const Decision decision = decide_about(candidate, found, tensor.storage(), *saved, step, /*is_for_recipes=*/false);
  return {decision, std::move(found)};
}

Decider::Decided Decider::decide_about_value(const LogRecipe::Root& root, const std::shared_ptr<SavedStorage>& saved,
                                             SavedStep& step, std::uint64_t place, bool may_be_made,
                                             const LogRecipe::SaveValue& save_value) {
  OperationLog& log = *OperationLog::here();
  const auto find = [&] { return LogRecipe::find(log, root, least_bytes_); };
  if (const auto asked = log.asked_about(root.value, step)) {
    return decide_as_asked(root.value, *asked, saved, find, save_value);
  }
  Found found = may_be_made ? believed(find(), place, save_value) : Found();
  Candidate candidate{.bytes = root.storage.nbytes(), .operation = StepPlanner::kNotSaved};
  const Decision decision = decide_about(candidate, found, root.storage, *saved, step, /*is_for_recipes=*/true);
  log.asked(root.value, {.pass = step.pass(),
                         .saved = saved,
                         .place = place,
                         .ordinal = static_cast<std::uint32_t>(candidate.ordinal),
                         .decision = decision});
  return {decision, std::move(found)};
}

Decider::Decided Decider::decide_as_asked(ValueId value, OperationLog::Value::Asked asked,
                                          const std::shared_ptr<SavedStorage>& saved,
                                          const std::function<std::unique_ptr<LogRecipe>()>& find,
                                          const LogRecipe::SaveValue& save_value) {
  saved->enter_step(asked.ordinal, nullptr, 0);
  asked.saved = saved;
  OperationLog::here()->asked(value, asked);
  Decided decided{.decision = asked.decision, .found = {}};
  if (asked.decision == Decision::kRecompute) {
    decided.found = believed(find(), asked.place, save_value);
    const bool is_lost = !decided.found.is_proven && plans_ != nullptr;
    decided.decision = is_lost ? Decision::kOffload : Decision::kRecompute;
  }
  return decided;
}

Decision Decider::decide_about(Candidate& candidate, const Found& found, const c10::Storage& storage,
                               SavedStorage& saved, SavedStep& step, bool is_for_recipes) {
  const Recipe* const recipe = found.is_proven ? found.recipe.get() : nullptr;
  const bool is_too_deep = recipe != nullptr && recipe->is_too_deep();
  const bool may_be_dropped = recipe != nullptr && (!is_too_deep || plans_ != nullptr);
  candidate.recompute = may_be_dropped ? recipe->cost() : Recompute::kNo;
  const Decision decision = plans_ != nullptr ? plans_->decide(candidate, storage, saved, step, recipe, is_for_recipes)
                                              : ask_policy(candidate, step);
  if (const auto recorder = step.recorder(); recorder != nullptr && found.is_awaited) {
    recorder->awaits_recipes();
  }
  return decision == Decision::kRecompute && is_too_deep && plans_ != nullptr ? Decision::kOffload : decision;
}

// Note [Proofs]
// What a schema says of an operator may be wrong, and kernels that are launched without the dispatcher are in no log.
// So a recipe is proven before anything is dropped for it: the bytes stay or move, and where backward asks for them,
// the recipe makes them beside, from what is there then, and the two are compared. A proof holds for a place in a step
// and the sequence of operations there, whatever the sizes, until one is refuted.
Decider::Found Decider::find_recipe(const at::Tensor& tensor, SavedStep& step, const MakeRecipe& make_recipe,
                                    const LogRecipe::SaveValue& save_value) {
  if (!needs_recipes_ || in_backward()) {
    return {};
  }
  OperationLog* const log = OperationLog::here();
  if (make_recipe == nullptr && (log == nullptr || !log->sees())) {
    return {};
  }
  constexpr std::uint64_t kMostPlaces = std::uint64_t{1} << 14;  // a step may have no end: Note [Steps that never end]
  const std::uint64_t place = step.next_search();
  if (place == 0 && log != nullptr) {  // no save of an earlier step is begun from
    constexpr std::size_t kBeforeTheFirstSave = 256;
    log->forget_but(kBeforeTheFirstSave);
  }
  if (place >= kMostPlaces) {
    return {};
  }
  if (make_recipe == nullptr) {
    return believed(LogRecipe::find(*log, tensor, least_bytes_), place, save_value);
  }
  Found found{.recipe = make_recipe()};
  look_for_proof(found, place);
  return found;
}

// What may be believed of a recipe that the log has.
Decider::Found Decider::believed(std::unique_ptr<LogRecipe> recipe, std::uint64_t place,
                                 const LogRecipe::SaveValue& save_value) {
  if (recipe == nullptr) {
    return {};
  }
  const std::optional<bool> may = plans_ == nullptr ? std::optional(true) : plans_->leaves().may_compute(*recipe);
  if (!may.value_or(false)) {
    return {.recipe = nullptr, .is_awaited = !may};
  }
  LogRecipe& logged = *recipe;
  Found found{.recipe = std::move(recipe)};
  look_for_proof(found, place);
  if (found.recipe != nullptr) {
    logged.save_values(found.proof, save_value);
  }
  return found;
}

void Decider::look_for_proof(Found& found, std::uint64_t place) {
  if (found.recipe == nullptr || found.recipe->is_given()) {
    found.is_proven = found.recipe != nullptr;
    return;
  }
  found.proof = c10::hash_combine(place, found.recipe->identity());
  Proof known;
  {
    const MutexLock lock(proofs_mutex_);
    if (proofs_.size() >= kMostProofs) {
      proofs_.clear();
    }
    Proof& proof = proofs_[found.proof];
    known = proof;
    ++proof.asked;
  }
  // A step whose backward never asks for the bytes proves nothing.
  constexpr int kMostAwaited = 3;
  found.is_proven = known.holds.value_or(false);
  found.is_awaited = !known.holds && known.asked < kMostAwaited;
  if (known.holds && !*known.holds) {
    found.recipe = nullptr;
  }
}

void Decider::prove(std::uint64_t proof, Recipe& recipe, const c10::Storage& bytes) noexcept {
  try {
    bool holds = false;
    try {
      holds = recipe.is_safe() && same_bytes(recipe.run(), bytes);
    } catch (const c10::OutOfMemoryError&) {  // another step may have room
      return;
    } catch (const std::exception&) {  // the operations cannot be run again like this
    }
    const MutexLock lock(proofs_mutex_);
    Proof& known = proofs_[proof];
    known.holds = known.holds.value_or(true) && holds;  // at another site of the same operations it may not have held
  } catch (...) {
    log_warning("what a recipe makes could not be compared");
  }
}

Decision Decider::ask_policy(Candidate& candidate, SavedStep& step) {
  TORCH_CHECK(asking_here != this,
              "ebb: a policy ran an operation that autograd saves tensors of, under the guard of the offloader that "
              "asked the policy. Put a NoOpGuard around the operation.");
  const MutexLock lock(policy_mutex_);
  const Decider* const before = std::exchange(asking_here, this);
  const auto over = c10::make_scope_exit([before] { asking_here = before; });
  candidate.ordinal = step.next_candidate();
  if (candidate.ordinal == 0) {
    if (steps_.history().take_dropped()) {
      policy_->drop_step();
    }
    policy_->begin_step();
    ++residency_.ledger().counters().steps;
  }
  return policy_->decide(candidate);
}

bool Decider::backward_begins(SavedStep& step) {
  const bool others_in_use = steps_.in_backward_here() > 0;
  if (plans_ != nullptr) {
    return plans_->backward_begins(step) && !others_in_use;
  }
  warn_of_head(step);
  return !others_in_use &&
         steps_.stall_monitor().backward_begins(residency_.tier().stall_stats(), step.order_is_known());
}

// Note [The head]
// Backward wants the storages that were saved last at once, so it waits for their copies from beginning to end. A plan
// keeps these storages, as it keeps every storage whose copy in has too little time. Without a plan the user has to put
// a NoOpGuard around the head. The user is told so in the first step if the last save looks like a head's: several
// times as large as any other save.
void Decider::warn_of_head(SavedStep& step) {
  if (looked_for_head_.exchange(true)) {
    return;
  }
  constexpr std::uint64_t kTimes = 3;
  constexpr std::uint64_t kLarge = std::uint64_t{16} << 20;
  const SavedStep::LastSave last = step.last_save();
  if (last.bytes >= kLarge && last.largest_before > 0 && last.bytes >= kTimes * last.largest_before) {
    log_warning("the step's last saved tensor, of " + human_bytes(last.bytes) +
                ", is moved right before backward wants it: put a NoOpGuard around the output head and the loss.");
  }
}

std::vector<std::string> Decider::warnings(const Stats& stats) {
  if (policy_ == nullptr) {
    return {};
  }
  const MutexLock lock(policy_mutex_);
  return ebb::warnings(stats, policy_->matches());
}

}  // namespace ebb
