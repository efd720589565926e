#include "offload/planning/plan_lifecycle.h"

#include <utility>
#include <variant>

#include <c10/util/Exception.h>

#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/planning/step_recorder.h"
#include "streams/base/mutex.h"

namespace ebb {
namespace {

constexpr std::uint64_t kNotToLearnFrom = 0;  // policies number steps from 1

// `meter`, with calls from several threads made one at a time.
DeviceMeter one_at_a_time(DeviceMeter meter) {
  if (!meter) {
    return meter;
  }
  return [mutex = std::make_shared<Mutex>(), meter = std::move(meter)] {
    const MutexLock lock(*mutex);
    return meter();
  };
}

}  // namespace

PlanLifecycle::PlanLifecycle(std::shared_ptr<PlannedPolicy> policy, std::shared_ptr<Tier> tier,
                             std::shared_ptr<DeviceAccount> account, DeviceMeter meter, Unmet unmet)
    : policy_(std::move(policy)),
      tier_(std::move(tier)),
      account_(std::move(account)),
      meter_(one_at_a_time(std::move(meter))),
      unmet_(unmet) {}

std::shared_ptr<StepRecorder> PlanLifecycle::step_begun() {
  const std::optional<std::uint64_t> step = policy_->recorded_step();
  if (policy_->met_long_step() && !std::exchange(warned_of_long_step_, true)) {
    log_warning("Options::device_budget: a step saved more than " + std::to_string(PlannedPolicy::kMostStorages) +
                " tensors, the most that are planned; forward passes without a backward count together while one of "
                "their saves lives. In a step of that many tensors everything moves or is recomputed.");
  }
  if (step) {
    count_unrecorded();
  }
  return step ? std::make_shared<StepRecorder>(tier_, account_, meter_, *step) : nullptr;
}

// Counts a step that is to be recorded, and warns once when many in a row gave no record. A forward pass of evaluation
// is recorded too and gives no record, so a few such steps are usual.
void PlanLifecycle::count_unrecorded() {
  constexpr int kMany = 20;
  if (++unrecorded_ == kMany) {
    log_warning(
        "Options::device_budget: " + std::to_string(kMany) +
        " forward passes gave no record to plan from, so that everything moves or is recomputed. Backward has to "
        "begin on the thread and the stream of the forward pass, and on its graph.");
  }
}

// Counts a recorded step, and warns once when many in a row have led to no plan.
void PlanLifecycle::count_unlike() {
  constexpr int kMany = 10;
  if (++unlike_ == kMany) {
    log_warning(
        "Options::device_budget: after " + std::to_string(kMany) +
        " recorded steps there is no plan to follow, because none of them saved tensors of the same sizes by the same "
        "operations as another. Where a step does not fit whole, everything moves or is recomputed. Pad batches to a "
        "few lengths, or let a policy decide.");
  }
}

std::optional<std::shared_ptr<StepRecorder>> PlanLifecycle::follows(const std::shared_ptr<const Plan>& plan) {
  if (plan == nullptr) {
    return std::shared_ptr<StepRecorder>();
  }
  unlike_ = 0;
  check(*plan);
  if (measured_.plan != plan) {
    measured_ = {};
    measured_.plan = plan;
  }
  constexpr int kMeasuredStep = 2;
  if (++measured_.steps < kMeasuredStep || measured_.cost) {
    return std::nullopt;
  }
  return std::make_shared<StepRecorder>(tier_, account_, meter_, kNotToLearnFrom);
}

void PlanLifecycle::check(const Plan& plan) {
  if (plan.fits) {
    return;
  }
  const std::string what =
      "Options::device_budget cannot be met: it is " + human_bytes(std::get<DeviceBytes>(policy_->goal()).bytes) +
      ", and a step takes at least " + human_bytes(plan.predicted.peak_bytes) +
      (meter_ ? " of device memory" : " for saved tensors (without Options::device_meter nothing else is counted)") +
      ", even when all that can be is offloaded (as far as there is room within Options::capacity_bytes) or recomputed";
  TORCH_CHECK(unmet_ == Unmet::kWarn, "ebb: ", what,
              ". Raise the budget, or set Options::device_budget_is_a_wish to train as near to it as can be.");
  if (!std::exchange(warned_, true)) {
    log_warning(what + ". Steps are as near to it as can be.");
  }
}

void PlanLifecycle::learn(const std::shared_ptr<const Plan>& plan, const StepRecorder& recorder,
                          const StepRecord& record) {
  unrecorded_ = 0;
  if (recorder.step() != kNotToLearnFrom) {
    policy_->learn(recorder.step(), record);
    count_unlike();
  } else if (measured_.plan == plan) {
    measured_.cost = recorder.cost();
    policy_->correct(measured_.plan, {record.end_ms, measured_.cost->ms, measured_.cost->peak_bytes});
    warn_if_over_budget();
  }
}

// Where the plan that was measured stays.
void PlanLifecycle::warn_if_over_budget() {
  const auto* const budget = std::get_if<DeviceBytes>(&policy_->goal());
  const std::optional<PlannedPolicy::Known> known = policy_->last_plan();
  const bool stays = known && known->plan == measured_.plan && known->plan->fits;
  if (budget == nullptr || !stays || measured_.cost->peak_bytes <= budget->bytes || std::exchange(warned_, true)) {
    return;
  }
  log_warning("Options::device_budget is " + human_bytes(budget->bytes) + ", and a step that followed the plan took " +
              human_bytes(measured_.cost->peak_bytes) +
              ": more than was predicted. A smaller budget would leave room for the difference.");
}

std::optional<std::uint64_t> PlanLifecycle::first_managed_bytes() const {
  const auto* const budget = std::get_if<DeviceBytes>(&policy_->goal());
  return budget == nullptr ? std::nullopt : std::optional(budget->bytes / first_divisor_);
}

std::optional<PlanReport> PlanLifecycle::report() const {
  const std::optional<PlannedPolicy::Known> known = policy_->last_plan();
  if (!known) {
    return std::nullopt;
  }
  const auto* const budget = std::get_if<DeviceBytes>(&policy_->goal());
  PlanReport report;
  const std::uint64_t limit = known->plan->device_bytes == kUnlimited ? 0 : known->plan->device_bytes;
  report.budget_bytes = budget != nullptr ? budget->bytes : std::max(known->plan->predicted.peak_bytes, limit);
  report.all_kept_ms = known->record.end_ms;
  report.record = known->record;
  report.rates = policy_->rates(*known);
  report.metered = meter_ != nullptr;
  report.on_cpu = tier_->device().is_cpu();
  report.predicted = known->plan->predicted;
  report.fits = known->plan->fits;
  report.managed = known->plan->managed;
  if (measured_.plan == known->plan) {
    report.actual = measured_.cost;
  }
  return report;
}

std::string PlanLifecycle::explain() const {
  const std::optional<PlannedPolicy::Known> known = policy_->last_plan();
  if (!known) {
    return "no plan yet: a plan takes " + std::to_string(PlannedPolicy::kRecordedSteps) +
           " steps of a kind (with managed tensors whose bound is the plan's, up to " +
           std::to_string(PlannedPolicy::kMostRecordedSteps) + "), which save tensors of at least " +
           human_bytes(policy_->least_bytes()) + " (Options::planned_minimum_bytes)\n";
  }
  return explain_plan(*known, policy_->goal(), *report());
}

}  // namespace ebb
