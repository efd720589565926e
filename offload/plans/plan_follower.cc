#include "offload/plans/plan_follower.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include <c10/util/Exception.h>

#include "offload/base/backward_pass.h"
#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/cache/recipe.h"
#include "offload/cache/residency.h"
#include "offload/managed/managed_set.h"
#include "offload/plans/explain.h"
#include "offload/plans/measure_link.h"
#include "offload/recording/step_recorder.h"
#include "offload/recording/use_log.h"
#include "offload/steps/saved_storage.h"
#include "offload/steps/steps.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNotToLearnFrom = 0;  // a planner numbers steps from 1

Goal goal_of(const DeviceBudget& budget, c10::Device device) {
  const auto goal = [&]<typename Budget>(const Budget& each) -> Goal {
    if constexpr (std::is_same_v<Budget, ShareOfFree>) {
      if (!device.is_cuda()) {
        throw std::invalid_argument(
            "ebb: Options::device_budget is a share of free memory, which is not known of the CPU; give bytes instead");
      }
      const DeviceHeadroom room = cuda_headroom(device);
      return DeviceBytes{room.in_use_bytes +
                         static_cast<std::uint64_t>(each.share * static_cast<double>(room.free_bytes))};
    } else {
      return each;
    }
  };
  return std::visit(goal, budget);
}

// The program's meter or the device's, with calls from several threads made one at a time.
DeviceMeter meter_of(const Options& options, c10::Device device) {
  DeviceMeter meter = options.device_meter || !device.is_cuda() ? options.device_meter : cuda_meter(device);
  if (!meter) {
    return meter;
  }
  return [mutex = std::make_shared<Mutex>(), meter = std::move(meter)] {
    const MutexLock lock(*mutex);
    return meter();
  };
}

// Counts one more step, and warns of its number when there are `many` in a row.
void count(int& steps, int many, const std::string& before, const std::string& after) {
  if (++steps == many) {
    log_warning("Options::device_budget: " + before + std::to_string(many) + after);
  }
}

// The indices in the recorded step of those storages that are in it.
std::vector<std::uint32_t> indices_in(const StepRecorder& recorder, const std::vector<const SavedStorage*>& storages) {
  std::vector<std::uint32_t> indices;
  for (const SavedStorage* const storage : storages) {
    if (const auto index = storage->index_in(recorder)) {
      indices.push_back(*index);
    }
  }
  return indices;
}

}  // namespace

PlanFollower::PlanFollower(const Options& options, Steps& steps, Residency& residency)
    : steps_(steps),
      residency_(residency),
      meter_(meter_of(options, residency.tier().device())),
      is_wish_(options.device_budget_is_a_wish),
      goal_(goal_of(options.device_budget.value(), residency.tier().device())),
      planner_(goal_, options.capacity_bytes.value_or(kUnlimited), measure_link(residency.tier()),
               options.planned_minimum_bytes) {}

std::shared_ptr<StepRecorder> PlanFollower::make_recorder(std::uint64_t step) const {
  return std::make_shared<StepRecorder>(residency_.shared_tier(), residency_.ledger().account(), meter_, step);
}

std::shared_ptr<ManagedSet> PlanFollower::managed() {
  const MutexLock lock(mutex_);
  return managed_.lock();
}

Decision PlanFollower::decide(Candidate& candidate, const c10::Storage& storage, SavedStorage& saved, SavedStep& step,
                              const Recipe* recipe, bool is_for_recipes) {
  const std::shared_ptr<ManagedSet> managed = this->managed();  // destroyed after the lock is released
  const Decision decision = [&] {
    const MutexLock lock(mutex_);
    const Decision decided = decide_locked(candidate, step, managed.get());
    const std::shared_ptr<StepRecorder> recorder = step.recorder();
    std::uint32_t index = 0;
    if (recorder != nullptr) {
      using Inputs = std::vector<const SavedStorage*>;
      index = recorder->saved(storage, candidate.recompute,
                              indices_in(*recorder, recipe == nullptr ? Inputs() : recipe->inputs()),
                              saved.held_by_ebb(), recipe == nullptr ? 0 : recipe->run_of_several(), is_for_recipes);
    }
    saved.enter_step(static_cast<std::uint32_t>(candidate.ordinal), recorder, index);
    return decided;
  }();
  make_room(step, candidate.ordinal, managed.get());
  return decision;
}

bool PlanFollower::rests(const Candidate& candidate, SavedStep& step, bool has_recipes) {
  const bool begins = step.begin();
  const std::shared_ptr<ManagedSet> managed =
      begins ? this->managed() : nullptr;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (begins) {
    begin_step_locked(step, managed.get());
    begun_ = &step;
  }
  const bool rests = begun_ == &step && planner_.rests(candidate);
  if (begins && !rests && !has_recipes) {
    planner_.looks_for_no_recipes();
  }
  unlike_ = rests ? 0 : unlike_;
  return rests;
}

void PlanFollower::saved_later(std::uint64_t ordinal) {
  const MutexLock lock(mutex_);
  planner_.saved_later(ordinal);
}

// Gives the candidate its ordinal, and has the step follow the plan that the decision comes from.
Decision PlanFollower::decide_locked(Candidate& candidate, SavedStep& step, ManagedSet* managed) {
  candidate.ordinal = step.next_candidate();
  const StepPlanner::Answer answer = planner_.decide(candidate);
  if (candidate.ordinal == 0 && step.recorder() != nullptr && !planner_.recorded_step()) {  // it is known
    step.record_by(nullptr);
  }
  if (answer.plan != step.plan()) {
    follow_locked(step, answer, candidate.ordinal == 0);
    if (managed != nullptr) {
      managed->log()->record_by(step.recorder());
    }
  }
  if (managed != nullptr && bound_by_ != answer.plan) {
    set_bound_locked(*managed, answer.plan);
  }
  return answer.decision;
}

// Has the step recorded if the planner wants that. A forward pass of evaluation is recorded too and gives no record, so
// a few steps without a record are usual.
void PlanFollower::begin_step_locked(SavedStep& step, ManagedSet* managed) {
  if (steps_.history().take_dropped()) {
    planner_.drop_step();
  }
  planner_.begin_step();
  ++residency_.ledger().counters().steps;
  if (planner_.met_long_step() && !std::exchange(warned_of_long_step_, true)) {
    log_warning("Options::device_budget: a step saved more than " + std::to_string(StepPlanner::kMostStorages) +
                " tensors, the most that are planned; forward passes without a backward count together while one of "
                "their saves lives. In a step of that many tensors everything moves or is recomputed.");
  }
  const std::optional<std::uint64_t> recorded = planner_.recorded_step();
  if (recorded) {
    count(unrecorded_, 20, "",
          " forward passes gave no record to plan from, so that everything moves or is recomputed. Backward has to "
          "begin on the thread and the stream of the forward pass, and on its graph.");
  }
  step.record_by(recorded ? make_recorder(*recorded) : nullptr);
  step.follow(nullptr);
  if (managed == nullptr) {
    return;
  }
  if (!in_backward()) {  // a backward pass that saves is of the period that it began in
    managed->log()->step_begins();
  }
  managed->log()->record_by(step.recorder());
}

// Has the second step recorded that follows a plan of its structure from the beginning. A step that has strayed from
// its structure is not recorded any more.
void PlanFollower::follow_locked(SavedStep& step, const StepPlanner::Answer& answer, bool begins) {
  if (answer.plan == nullptr) {
    step.follow(nullptr);
    step.record_by(nullptr);
    return;
  }
  unlike_ = 0;
  check_locked(*answer.plan);  // may throw: the step then follows no plan
  if (answer.structure != measured_.structure || answer.revision != measured_.revision) {
    measured_ = {.structure = answer.structure, .revision = answer.revision};
    step.record_by(nullptr);
  }
  step.follow(answer.plan);
  constexpr int kMeasuredStep = 2;
  if (begins && ++measured_.steps >= kMeasuredStep && !measured_.cost) {
    step.record_by(make_recorder(kNotToLearnFrom));
  }
  if (step.recorder() != nullptr) {
    measured_.plan = answer.plan;
  }
}

void PlanFollower::check_locked(const Plan& plan) {
  if (plan.fits) {
    return;
  }
  const std::string what =
      "Options::device_budget cannot be met: it is " + human_bytes(std::get<DeviceBytes>(goal_).bytes) +
      ", and a step takes at least " + human_bytes(plan.predicted.peak_bytes) +
      (meter_ ? " of device memory" : " for saved tensors (without Options::device_meter nothing else is counted)") +
      ", even when all that can be is offloaded (as far as there is room within Options::capacity_bytes) or recomputed";
  TORCH_CHECK(is_wish_, "ebb: ", what,
              ". Raise the budget, or set Options::device_budget_is_a_wish to train as near to it as can be.");
  if (!std::exchange(warned_, true)) {
    log_warning(what + ". Steps are as near to it as can be.");
  }
}

// Shrinks managed storages to their bound, and the stash to what the plan's schedule allows after the candidate.
void PlanFollower::make_room(SavedStep& step, std::uint64_t ordinal, ManagedSet* managed) {
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  if (managed != nullptr && is_over_bound_.exchange(false)) {
    const StepRecorder::ClockPause pause(recorder.get());
    managed->fit();
  }
  if (step.plan() != nullptr) {
    const StepRecorder::ClockPause pause(recorder.get());
    residency_.stash().shrink_to(steps_.stash_limit_after(step, static_cast<std::uint32_t>(ordinal)));
  }
}

void PlanFollower::found_no_room(SavedStep& step, std::uint64_t bytes) {
  found_no_room_ = true;
  if (step.plan() != nullptr && !warned_of_no_room_.exchange(true)) {
    log_warning("a plan offloads a storage of " + human_bytes(bytes) +
                " for which host memory or disk has no room: it stays on the device, and Options::device_budget may "
                "be exceeded");
  }
}

bool PlanFollower::backward_begins(SavedStep& step) {
  const std::shared_ptr<ManagedSet> managed = this->managed();
  if (managed != nullptr) {
    managed->log()->backward_begins();
  }
  if (found_no_room_.exchange(false)) {
    const std::uint64_t homes = residency_.managed_homes().now_bytes();
    const std::uint64_t leased = residency_.tier().pool_stats().now_bytes;
    const std::uint64_t offloaded = leased - std::min(leased, homes);
    const MutexLock lock(mutex_);
    planner_.limit_host(offloaded);
  }
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  if (recorder != nullptr) {
    recorder->backward_begins();
  }
  const std::shared_ptr<const Plan> plan = step.plan();
  if (plan != nullptr) {
    const StepRecorder::ClockPause pause(recorder.get());
    residency_.stash().shrink_to(plan->schedule.stash.in_backward);
  }
  return plan != nullptr;
}

void PlanFollower::backward_is_over(SavedStep& step, bool failed) {
  const std::shared_ptr<ManagedSet> managed = this->managed();
  if (managed != nullptr) {
    managed->log()->backward_is_over(failed);
  }
  const std::shared_ptr<StepRecorder> recorder = step.recorder();
  if (recorder == nullptr) {
    return;
  }
  if (failed) {  // the recorder has not seen a whole step
    recorder->give_up();
    return;
  }
  auto [record, cost, found_device_full] = recorder->finish();  // without the lock: finish waits for the device
  if (record) {
    if (managed != nullptr) {
      std::optional<std::vector<ManagedUse>> period = managed->log()->last_period();
      record->is_preliminary = record->is_preliminary || !period || period->empty();
      record->managed_ahead_bytes = managed->prefetch_bytes();
      record->managed = std::move(period).value_or(std::vector<ManagedUse>{});
      record->managed_device_bytes = meter_ ? managed->device_bytes() : 0;
    }
    const MutexLock lock(mutex_);
    learn_locked(step, *recorder, *record, cost);
  } else if (managed != nullptr && found_device_full && step.plan() == nullptr) {
    lower_first_bound(*managed);
  }
}

void PlanFollower::learn_locked(SavedStep& step, const StepRecorder& recorder, const StepRecord& record,
                                const StepCost& cost) {
  unrecorded_ = 0;
  if (recorder.step() != kNotToLearnFrom) {
    planner_.learn(recorder.step(), record);
    count(unlike_, 10, "after ",
          " recorded steps there is no plan to follow, because no two of them ran the same operations on tensors whose "
          "sizes grow together. Where a step does not fit whole, everything moves or is recomputed. Let a policy "
          "decide, or pad batches to a few sizes.");
  } else if (measured_.plan == step.plan()) {
    measured_.cost = cost;
    if (planner_.correct(measured_.plan, record.end_ms, cost)) {
      measured_ = {};
    } else {
      warn_if_over_budget_locked();
    }
  }
}

// Where the plan that was measured stays.
void PlanFollower::warn_if_over_budget_locked() {
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  const StepPlanner::Known* const known = planner_.last_plan();
  const bool stays = known != nullptr && known->plan == measured_.plan && known->plan->fits;
  if (budget == nullptr || !stays || measured_.cost->peak_bytes <= budget->bytes || std::exchange(warned_, true)) {
    return;
  }
  log_warning("Options::device_budget is " + human_bytes(budget->bytes) + ", and a step that followed the plan took " +
              human_bytes(measured_.cost->peak_bytes) +
              ": more than was predicted. A smaller budget would leave room for the difference.");
}

std::optional<std::uint64_t> PlanFollower::first_managed_bytes() const {
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  return budget == nullptr ? std::nullopt : std::optional(budget->bytes / first_divisor_);
}

// `plan`: of the step that is under way; null for none.
void PlanFollower::set_bound_locked(ManagedSet& managed, const std::shared_ptr<const Plan>& plan) {
  bound_by_ = plan;
  const bool plans_it = plan != nullptr && plan->managed;
  managed.set_device_bytes(plans_it ? plan->managed->device_bytes : *first_managed_bytes());
  is_over_bound_ = managed.is_over_bound();
}

void PlanFollower::plans_bound_of(const std::shared_ptr<ManagedSet>& managed) {
  const MutexLock lock(mutex_);
  managed_ = managed;
  if (managed->log() == nullptr) {
    managed->log_to(std::make_shared<UseLog>());
  }
  set_bound_locked(*managed, nullptr);
  planner_.forget_plans();  // they know nothing of these storages
}

// A step that was to be recorded, and follows no plan, has found the device full: halves the bound, down to a 64th.
void PlanFollower::lower_first_bound(ManagedSet& managed) {
  constexpr std::uint64_t kMostDivisor = 64;
  const MutexLock lock(mutex_);
  if (bound_by_ == nullptr) {
    first_divisor_ = std::min(2 * first_divisor_.load(), kMostDivisor);
    set_bound_locked(managed, nullptr);
  }
}

std::optional<PlanReport> PlanFollower::report() {
  const MutexLock lock(mutex_);
  return report_locked();
}

std::optional<PlanReport> PlanFollower::report_locked() const {
  const StepPlanner::Known* const known = planner_.last_plan();
  if (known == nullptr) {
    return std::nullopt;
  }
  const Plan& plan = *known->plan;
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  const std::uint64_t limit = plan.device_bytes == kUnlimited ? 0 : plan.device_bytes;
  return PlanReport{.budget_bytes = budget != nullptr ? budget->bytes : std::max(plan.predicted.peak_bytes, limit),
                    .all_kept_ms = known->record.end_ms,
                    .record = known->record,
                    .rates = planner_.rates(*known),
                    .metered = meter_ != nullptr,
                    .on_cpu = residency_.tier().device().is_cpu(),
                    .predicted = plan.predicted,
                    .fits = plan.fits,
                    .managed = plan.managed,
                    .actual = measured_.plan == known->plan ? measured_.cost : std::nullopt};
}

std::string PlanFollower::explain() {
  const MutexLock lock(mutex_);
  if (const StepPlanner::Known* const known = planner_.last_plan()) {
    return explain_plan(*known, goal_, report_locked().value());
  }
  return "no plan yet: a plan takes " + std::to_string(StepPlanner::kRecordedSteps) +
         " steps of a kind (with managed tensors whose bound is the plan's, up to " +
         std::to_string(StepPlanner::kMostRecordedSteps) + "), which save tensors of at least " +
         human_bytes(planner_.least_bytes()) + " (Options::planned_minimum_bytes)\n";
}

}  // namespace ebb
