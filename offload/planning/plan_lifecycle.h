#pragma once

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

// Has steps recorded that PlannedPolicy wants recorded, and their plans followed.
//
// Note [A plan is checked]
// The second step that follows a plan is recorded too: what it took is held against what was predicted. If its compute
// was slower or faster than in the steps that the plan was made from, the plan is made again with that. (Those steps
// wait for copies most of the time, and a device that waits may run at higher clocks: 7 % on an H200.) So it is if
// copies were slower than measured: on a CPU they share its cores with compute. No other step that follows a plan waits
// for the device.
//
// Threads: every member may be called from any thread that holds the lock under which policies are called,
// Decider::policy_mutex_. Clang does not check that, because the lock is another object's.
class PlanLifecycle {
 public:
  enum class Unmet : std::uint8_t { kThrow, kWarn };

  // `meter`: empty for none.
  PlanLifecycle(std::shared_ptr<PlannedPolicy> policy, std::shared_ptr<Tier> tier,
                std::shared_ptr<DeviceAccount> account, DeviceMeter meter, Unmet unmet);

  // The policy's begin_step has been called for a step: what it is to be recorded by; null for nothing. It
  // follows no plan yet.
  [[nodiscard]] std::shared_ptr<StepRecorder> step_begun();

  // The plan that the policy has decided by; null for none.
  [[nodiscard]] std::shared_ptr<const Plan> plan() const { return policy_->plan(); }

  // A step follows `plan` from now on; null: it has strayed from the last one. What it is to be recorded by
  // instead, where that changes. Throws c10::Error, or warns once, where the goal cannot be met.
  [[nodiscard]] std::optional<std::shared_ptr<StepRecorder>> follows(const std::shared_ptr<const Plan>& plan);

  // What was recorded of a step that is over, and followed `plan`, or none.
  void learn(const std::shared_ptr<const Plan>& plan, const StepRecorder& recorder, const StepRecord& record);

  // See Offloader.
  [[nodiscard]] std::optional<PlanReport> report() const;
  [[nodiscard]] std::string explain() const;

 private:
  struct Measured {
    std::shared_ptr<const Plan> plan;  // that is or was last followed
    int steps = 0;                     // that have followed it
    std::optional<StepCost> cost;
  };

  void count_unrecorded();
  void check(const Plan& plan);

  const std::shared_ptr<PlannedPolicy> policy_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<DeviceAccount> account_;
  const DeviceMeter meter_;
  const Unmet unmet_;
  bool warned_ = false;
  bool warned_of_long_step_ = false;
  int unrecorded_ = 0;  // steps in a row that were to be recorded and gave no record
  Measured measured_;
};

// How fast a tier's copies are: blocks of some MiB out and back, a few times. Falls back on LinkRates' own figures
// where the tier or the device has no room for it.
[[nodiscard]] LinkRates measure_link(Tier& tier);

}  // namespace ebb
