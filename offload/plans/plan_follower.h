#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Storage.h>

#include "offload/device_meter.h"
#include "offload/options.h"
#include "offload/plan_report.h"
#include "offload/recompute/sharded_leaves.h"
#include "policy/step_planner.h"
#include "streams/base/mutex.h"

namespace ebb {

class ManagedSet;
class Recipe;
class Residency;
class SavedStep;
class SavedStorage;
class StepRecorder;
class Steps;

// Under a budget has steps recorded, plans made from the records, and the plans followed and checked. A plan decides
// about saved storages, and about the bound of managed storages if the program has left that
// open.
//
// Note [A plan is checked]
// The second step that follows a plan is recorded too, and its cost is compared with the prediction. If the step's
// compute was slower or faster than in the steps that the plan was made from, the plan is made again with the new
// times. (Steps that record for a plan wait for copies most of the time, and a device that waits may run at higher
// clocks: 7 % on an H200.) The plan is also made again if copies were slower than measured: on a CPU copies share the
// cores with compute. No other step that follows a plan waits for the device.
//
// Threads: every member may be called from any thread.
class PlanFollower {
 public:
  // `options`: with Options::device_budget. `steps` and `residency` must outlive this. The calling thread waits while
  // the link is measured. Throws std::invalid_argument for a share of free memory on a device that does not tell.
  PlanFollower(const Options& options, Steps& steps, Residency& residency);
  PlanFollower(const PlanFollower&) = delete;
  PlanFollower& operator=(const PlanFollower&) = delete;

  [[nodiscard]] ShardedLeaves& leaves() { return leaves_; }

  // Begins the step with the first storage. Whether the step rests, and so keeps the storage, as StepPlanner::rests().
  // To be called for each storage that autograd saves, and decide() only where the result is false. `has_recipes`: the
  // thread's log has not been at rest since the step began.
  [[nodiscard]] bool rests(const Candidate& candidate, SavedStep& step, bool has_recipes);

  // As StepPlanner's.
  void saved_later(std::uint64_t ordinal);

  // As Decider::decide, for a candidate whose ordinal is not known yet. `is_for_recipes`: as in StepRecorder::saved.
  [[nodiscard]] Decision decide(Candidate& candidate, const c10::Storage& storage, SavedStorage& saved, SavedStep& step,
                                const Recipe* recipe, bool is_for_recipes = false);

  // Says that no block was free for a storage of so many bytes that was to be offloaded. Warns once that the budget may
  // be exceeded. Later plans offload no more than there is when backward begins.
  void found_no_room(SavedStep& step, std::uint64_t bytes);

  // Says that a backward pass begins on this thread, probably on `step`. Shrinks the stash to what the plan's schedule
  // allows in backward. Returns whether there is a plan.
  [[nodiscard]] bool backward_begins(SavedStep& step);

  // Says that the backward pass on `step` is over; `failed`: by an exception. Waits for the device if the step is
  // recorded.
  void backward_is_over(SavedStep& step, bool failed);

  // The bound for managed storages in a step that follows no plan: a quarter of the budget, or less after steps that
  // have found the device full. nullopt where the goal is not in bytes.
  [[nodiscard]] std::optional<std::uint64_t> first_managed_bytes() const;

  // Says that plans are to set the bound of these storages, or that more are managed among them.
  void plans_bound_of(const std::shared_ptr<ManagedSet>& managed);

  // See Offloader.
  [[nodiscard]] std::string explain();
  [[nodiscard]] std::optional<PlanReport> report();

 private:
  // The steps of a structure that have followed plans, since the structure's last correction.
  struct Measured {
    std::uint64_t structure = 0;
    std::uint64_t revision = 0;
    int steps = 0;
    std::shared_ptr<const Plan> plan = {};  // of the step that is measured; null before that
    std::optional<StepCost> cost = {};
  };

  [[nodiscard]] Decision decide_locked(Candidate& candidate, SavedStep& step, ManagedSet* managed) EBB_REQUIRES(mutex_);
  void begin_step_locked(SavedStep& step, ManagedSet* managed) EBB_REQUIRES(mutex_);
  void follow_locked(SavedStep& step, const StepPlanner::Answer& answer, bool begins) EBB_REQUIRES(mutex_);
  void check_locked(const Plan& plan) EBB_REQUIRES(mutex_);
  void make_room(SavedStep& step, std::uint64_t ordinal, ManagedSet* managed);
  void learn_locked(SavedStep& step, const StepRecorder& recorder, const StepRecord& record, const StepCost& cost)
      EBB_REQUIRES(mutex_);
  void warn_if_over_budget_locked() EBB_REQUIRES(mutex_);
  void set_bound_locked(ManagedSet& managed, const std::shared_ptr<const Plan>& plan) EBB_REQUIRES(mutex_);
  void lower_first_bound(ManagedSet& managed);
  [[nodiscard]] std::optional<PlanReport> report_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<StepRecorder> make_recorder(std::uint64_t step) const;
  [[nodiscard]] std::shared_ptr<ManagedSet> managed();

  Steps& steps_;
  Residency& residency_;
  const DeviceMeter meter_;  // empty for none
  const bool is_wish_;
  const Goal goal_;
  ShardedLeaves leaves_;

  Mutex mutex_;
  StepPlanner planner_ EBB_GUARDED_BY(mutex_);
  Measured measured_ EBB_GUARDED_BY(mutex_);
  int unrecorded_ EBB_GUARDED_BY(mutex_) = 0;  // steps in a row that were to be recorded and gave no record
  int unlike_ EBB_GUARDED_BY(mutex_) = 0;      // recorded steps in a row after which no plan was followed
  bool warned_ EBB_GUARDED_BY(mutex_) = false;
  bool warned_of_long_step_ EBB_GUARDED_BY(mutex_) = false;
  const SavedStep* begun_ EBB_GUARDED_BY(mutex_) = nullptr;      // the step that began last; may be gone
  std::weak_ptr<ManagedSet> managed_ EBB_GUARDED_BY(mutex_);     // whose bound plans set; null for none
  std::shared_ptr<const Plan> bound_by_ EBB_GUARDED_BY(mutex_);  // the plan that set the bound; null: none
  std::atomic<std::uint64_t> first_divisor_{4};                  // of the budget, for first_managed_bytes()
  std::atomic<bool> is_over_bound_{false};                       // managed storages may be
  std::atomic<bool> found_no_room_{false};                       // since backward last began
  std::atomic<bool> warned_of_no_room_{false};
};

}  // namespace ebb
