#include "offload/runtime/plan_decider.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "offload/base/backward_pass.h"
#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/base/managed_key.h"
#include "offload/cache/residency.h"
#include "offload/managed/managed_set.h"
#include "offload/planning/step_recorder.h"
#include "offload/recompute/graph_recipe.h"
#include "offload/steps/saved_storage.h"
#include "offload/steps/steps.h"
#include "offload/tensors/saved_tensor.h"

namespace ebb {
namespace {

// The recipe's inputs that are storages of the recorded step, as indices in its record.
std::vector<std::uint32_t> inputs_in(const StepRecorder& recorder, const GraphRecipe* recipe) {
  std::vector<std::uint32_t> inputs;
  if (recipe != nullptr) {
    for (const auto& input : recipe->inputs()) {
      const SavedStorage* const storage = input == nullptr ? nullptr : input->storage();
      if (const auto index = storage == nullptr ? std::nullopt : storage->index_in(recorder)) {
        inputs.push_back(*index);
      }
    }
  }
  return inputs;
}

}  // namespace

PlanDecider::PlanDecider(std::shared_ptr<Policy> policy, std::unique_ptr<PlanLifecycle> lifecycle, Steps& steps,
                         Residency& residency)
    : Decider(std::move(policy), steps, residency), lifecycle_(std::move(lifecycle)) {}

void PlanDecider::found_no_room(SavedStep& step, std::uint64_t bytes) {
  found_no_room_ = true;
  if (step.plan() != nullptr && !warned_of_no_room_.exchange(true)) {
    log_warning("a plan offloads a storage of " + human_bytes(bytes) +
                " for which host memory or disk has no room: it stays on the device, and Options::device_budget may "
                "be exceeded");
  }
}

bool PlanDecider::may_compute(const GraphRecipe& recipe) {
  if (!leaves_may_be_sharded_) {
    return true;
  }
  bool all_stay = true;
  const MutexLock lock(leaves_mutex_);
  for (const auto& input : recipe.inputs()) {
    if (input != nullptr && input->is_of_leaf() && !is_managed(input->shape())) {
      const c10::Storage& storage = input->shape().storage();
      const auto known = leaves_.try_emplace(storage.unsafeGetStorageImpl(),
                                             Leaf{.storage = storage.getWeakStorageImpl(), .data = storage.data()});
      all_stay = known.first->second.stays.value_or(false) && all_stay;
    }
  }
  return all_stay;
}

void PlanDecider::guard_ended() noexcept {
  if (leaves_may_be_sharded_) {
    const MutexLock lock(leaves_mutex_);
    std::erase_if(leaves_, [](const auto& each) { return each.second.storage.expired(); });
    for (auto& [storage, leaf] : leaves_) {  // not made strong: Note [The interpreter's lock]
      leaf.stays = leaf.stays.value_or(true) && leaf.storage._unsafe_get_target()->data() == leaf.data;
    }
  }
}

std::optional<std::uint64_t> PlanDecider::first_managed_bytes() {
  const MutexLock lock(policy_mutex_);
  return lifecycle_->first_managed_bytes();
}

// A step that was to be recorded, and follows no plan, has found the device full.
void PlanDecider::lower_first_bound(ManagedSet& managed) {
  const MutexLock lock(policy_mutex_);
  if (bound_by_ == nullptr) {
    lifecycle_->first_bound_was_too_high();
    managed.set_device_bytes(*lifecycle_->first_managed_bytes());
    is_over_bound_ = managed.is_over_bound();
  }
}

void PlanDecider::plans_bound_of(const std::shared_ptr<ManagedSet>& managed) {
  const MutexLock lock(policy_mutex_);
  managed_ = managed;
  bound_by_ = nullptr;
  managed->set_device_bytes(*lifecycle_->first_managed_bytes());
  is_over_bound_ = managed->is_over_bound();
  lifecycle_->forget_plans();  // they know nothing of these storages
}

std::shared_ptr<ManagedSet> PlanDecider::managed() {
  const MutexLock lock(policy_mutex_);
  return managed_.lock();
}

// The set, which does not end before decided() is called.
ManagedSet* PlanDecider::managed_locked() {
  if (held_ == nullptr) {
    held_ = managed_.lock();
    is_held_ = held_ != nullptr;
  }
  return held_.get();
}

// `plan`: of the step that is under way; null for none.
void PlanDecider::set_bound_locked(const std::shared_ptr<const Plan>& plan) {
  if (bound_by_ == plan) {
    return;
  }
  if (ManagedSet* const managed = managed_locked()) {
    bound_by_ = plan;
    const bool plans_it = plan != nullptr && plan->managed;
    managed->set_device_bytes(plans_it ? plan->managed->device_bytes : *lifecycle_->first_managed_bytes());
    is_over_bound_ = managed->is_over_bound();
  }
}

bool PlanDecider::backward_begins(SavedStep& step) {
  if (const std::shared_ptr<ManagedSet> managed = this->managed()) {
    managed->backward_begins();
  }
  if (found_no_room_.exchange(false)) {
    const std::uint64_t homes = residency().managed_homes().now_bytes();
    const std::uint64_t leased = residency().tier().pool_stats().now_bytes;
    const std::uint64_t offloaded = leased - std::min(leased, homes);
    const MutexLock lock(policy_mutex_);
    lifecycle_->limit_host(offloaded);
  }
  const bool others_in_use = steps().in_backward_here() > 0;
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  if (recorder != nullptr) {
    recorder->backward_begins();
  }
  const std::shared_ptr<const Plan> plan = step.plan();
  if (plan != nullptr) {
    const StepRecorder::ClockPause pause(recorder.get());
    residency().stash().shrink_to(plan->schedule.stash.in_backward);
  }
  return plan != nullptr && !others_in_use;
}

void PlanDecider::backward_is_over(SavedStep& step, bool failed) {
  const std::shared_ptr<ManagedSet> managed = this->managed();
  if (managed != nullptr) {
    managed->backward_is_over(failed);
  }
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  if (recorder == nullptr) {
    return;
  }
  if (failed) {  // the recorder has not seen a whole step
    recorder->give_up();
    return;
  }
  if (std::optional<StepRecord> record = recorder->finish()) {  // without the lock: finish waits for the device
    if (managed != nullptr) {
      std::optional<std::vector<ManagedUse>> uses = managed->last_period();
      record->awaits_managed = !uses || uses->empty();
      record->managed_ahead_bytes = managed->prefetch_bytes();
      record->managed = std::move(uses).value_or(std::vector<ManagedUse>{});
      record->managed_device_bytes = lifecycle_->is_metered() ? managed->device_bytes() : 0;
    }
    const MutexLock lock(policy_mutex_);
    lifecycle_->learn(step.plan(), *recorder, *record);
  } else if (managed != nullptr && recorder->take_found_device_full() && step.plan() == nullptr) {
    lower_first_bound(*managed);
  }
}

std::optional<PlanReport> PlanDecider::plan_report() {
  const MutexLock lock(policy_mutex_);
  return lifecycle_->report();
}

std::string PlanDecider::explain() {
  const MutexLock lock(policy_mutex_);
  return lifecycle_->explain();
}

void PlanDecider::step_begins_locked(SavedStep& step) {
  step.record_by(lifecycle_->step_begun());
  step.follow(nullptr);
  ManagedSet* const managed = managed_locked();
  if (managed == nullptr) {
    return;
  }
  if (!in_backward()) {  // a backward pass that saves is of the period that it began in
    managed->step_begins();
  }
  managed->record_by(step.recorder());
  if (step.recorder() != nullptr) {
    set_bound_locked(nullptr);
  }
}

void PlanDecider::decided_locked(SavedStep& step) {
  std::shared_ptr<const Plan> plan = lifecycle_->plan();
  if (plan != step.plan()) {
    auto dropped = c10::make_scope_exit([&]() EBB_REQUIRES(policy_mutex_) { held_ = nullptr; });  // the set owns this
    auto recorder = lifecycle_->follows(plan);  // may throw: the step then follows no plan
    dropped.release();
    step.follow(plan);
    if (recorder) {
      step.record_by(*std::move(recorder));
    }
    if (ManagedSet* const managed = managed_locked()) {
      managed->record_by(step.recorder());
    }
  }
  set_bound_locked(plan);
}

void PlanDecider::enter_locked(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step,
                               const GraphRecipe* recipe, const Candidate& candidate) {
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  std::uint32_t index = 0;
  if (recorder != nullptr) {
    index = recorder->saved(tensor.storage(), candidate.recompute, inputs_in(*recorder, recipe), saved.held_by_ebb());
  }
  saved.enter_step(static_cast<std::uint32_t>(candidate.ordinal), recorder, index);
}

// Shrinks the stash to what the plan's schedule allows after the candidate, and managed storages to their bound.
void PlanDecider::decided(SavedStep& step, std::uint32_t ordinal) {
  if (is_held_.exchange(false)) {
    std::shared_ptr<ManagedSet> ends;  // after the lock is released
    const MutexLock lock(policy_mutex_);
    ends = std::move(held_);
  }
  if (is_over_bound_.exchange(false)) {
    if (const std::shared_ptr<ManagedSet> managed = this->managed()) {
      const std::shared_ptr<StepRecorder> recorder = step.recorder();
      const StepRecorder::ClockPause pause(recorder.get());
      managed->fit();
    }
  }
  if (step.plan() != nullptr) {
    const std::shared_ptr<StepRecorder> recorder = step.recorder();
    const StepRecorder::ClockPause pause(recorder.get());
    residency().stash().shrink_to(steps().stash_limit_after(step, ordinal));
  }
}

std::optional<Decider::RegionsPlace> PlanDecider::region_begins(const std::vector<at::Tensor>& inputs,
                                                                SavedStep& step) {
  Candidate candidate;
  candidate.region = true;
  candidate.operation = "ebb::checkpoint";
  candidate.recompute = Recompute::kComputeBound;
  std::vector<std::shared_ptr<SavedStorage>> saved;  // of the inputs, as far as they are saved
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.has_storage()) {
      saved.push_back(steps().table().find(input.storage(), VersionId(input.unsafeGetTensorImpl()->version_counter())));
    }
  }
  const RegionsPlace place = [&] {
    const MutexLock lock(policy_mutex_);
    return enter_region_locked(candidate, saved, step);
  }();
  decided(step, static_cast<std::uint32_t>(candidate.ordinal));
  return place;
}

Decider::RegionsPlace PlanDecider::enter_region_locked(Candidate& candidate,
                                                       const std::vector<std::shared_ptr<SavedStorage>>& inputs,
                                                       SavedStep& step) {
  step.began();
  auto ended = c10::make_scope_exit([&step] { step.ended(); });  // if the policy throws
  RegionsPlace place{ask_locked(candidate, step) == Decision::kKeep, step.recorder(), 0,
                     static_cast<std::uint32_t>(candidate.ordinal)};
  if (place.recorder != nullptr) {
    std::vector<std::uint32_t> indices;
    for (const std::shared_ptr<SavedStorage>& input : inputs) {
      if (const auto index = input == nullptr ? std::nullopt : input->index_in(*place.recorder)) {
        indices.push_back(*index);
      }
    }
    place.index = place.recorder->region_begins(std::move(indices));
  }
  ended.release();
  return place;
}

}  // namespace ebb
