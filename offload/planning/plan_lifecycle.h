#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "offload/device_meter.h"
#include "offload/report/device_account.h"
#include "offload/report/explain.h"
#include "policy/planned_policy.h"
#include "streams/base/tier.h"

namespace ebb {

class StepRecorder;

// Has the steps recorded that PlannedPolicy wants recorded, and has plans followed and checked.
//
// Note [A plan is checked]
// The second step that follows a plan is recorded too, and its cost is compared with the prediction. If the step's
// compute was slower or faster than in the steps that the plan was made from, the plan is made again with the new
// times. (Steps that record for a plan wait for copies most of the time, and a device that waits may run at higher
// clocks: 7 % on an H200.) The plan is also made again if copies were slower than measured: on a CPU copies share the
// cores with compute. No other step that follows a plan waits for the device.
//
// Threads: every member may be called from any thread that holds the lock under which policies are called,
// Decider::policy_mutex_. Clang does not check that, because the lock is another object's.
class PlanLifecycle {
 public:
  enum class Unmet : std::uint8_t { kThrow, kWarn };

  // `meter`: empty for none.
  PlanLifecycle(std::shared_ptr<PlannedPolicy> policy, std::shared_ptr<Tier> tier,
                std::shared_ptr<DeviceAccount> account, DeviceMeter meter, Unmet unmet);

  // Called after the policy's begin_step, when the step follows no plan yet. Returns the recorder that the step is to
  // be recorded by; null for none.
  [[nodiscard]] std::shared_ptr<StepRecorder> step_begun();

  // The plan that the policy's last decision came from; null for none.
  [[nodiscard]] std::shared_ptr<const Plan> plan() const { return policy_->plan(); }

  // Notes that a step follows `plan` from now on; null: the step has strayed from its last plan. Returns the recorder
  // that replaces the step's recorder (null: the step is not recorded any more), or nullopt if the recorder stays.
  // Throws c10::Error, or warns once, where the goal cannot be met.
  [[nodiscard]] std::optional<std::shared_ptr<StepRecorder>> follows(const std::shared_ptr<const Plan>& plan);

  // Takes the record of a step that is over. `plan`: the plan that the step followed; null for none.
  void learn(const std::shared_ptr<const Plan>& plan, const StepRecorder& recorder, const StepRecord& record);

  // The bound for managed storages in a step that follows no plan: a quarter of the budget, or less after
  // first_bound_was_too_high(). nullopt where the goal is not in bytes.
  [[nodiscard]] std::optional<std::uint64_t> first_managed_bytes() const;

  // Halves that bound, down to a 64th of the budget: a step that was to be recorded found the device full, and gave no
  // record.
  void first_bound_was_too_high() { first_divisor_ = std::min(2 * first_divisor_, kMostDivisor); }

  // As PlannedPolicy::limit_host.
  void limit_host(std::uint64_t bytes) { policy_->limit_host(bytes); }

  // Has steps recorded and planned anew.
  void forget_plans() { policy_->forget_plans(); }

  // Whether records have other memory, managed storages among it.
  [[nodiscard]] bool is_metered() const { return meter_ != nullptr; }

  // As Offloader::plan_report and Offloader::explain return them.
  [[nodiscard]] std::optional<PlanReport> report() const;
  [[nodiscard]] std::string explain() const;

 private:
  struct Measured {
    std::shared_ptr<const Plan> plan;  // the plan that was followed last
    int steps = 0;                     // how many steps have followed the plan
    std::optional<StepCost> cost;
  };

  void count_unrecorded();
  void count_unlike();
  void warn_if_over_budget();
  void check(const Plan& plan);

  const std::shared_ptr<PlannedPolicy> policy_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<DeviceAccount> account_;
  const DeviceMeter meter_;
  const Unmet unmet_;
  bool warned_ = false;
  bool warned_of_long_step_ = false;
  static constexpr std::uint64_t kMostDivisor = 64;
  std::uint64_t first_divisor_ = 4;  // of the budget, for first_managed_bytes()
  int unrecorded_ = 0;               // steps in a row that were to be recorded and gave no record
  int unlike_ = 0;                   // recorded steps in a row after which no plan was followed
  Measured measured_;
};

// Measures how fast a tier's copies are, by copying blocks of some MiB out and in a few times. The calling thread waits
// for the copies. Returns the default figures of LinkRates where the tier or the device has no room for the blocks.
[[nodiscard]] LinkRates measure_link(Tier& tier);

}  // namespace ebb
