#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/plan_report.h"
#include "offload/report/device_account.h"
#include "offload/stats.h"
#include "policy/policy.h"
#include "streams/base/mutex.h"

namespace ebb {

class GraphRecipe;
class ManagedSet;
class Residency;
class SavedStorage;
class StepRecorder;
class Steps;
class SavedStep;

// Decides what becomes of saved storages and of checkpointed regions. Two strategies: a policy alone decides
// (PolicyDecider), or the plan of a budget decides (PlanDecider).
//
// Threads: every member may be called from any thread. The policy is never called from two threads at once.
class Decider {
 public:
  // `steps` and `residency` must outlive this.
  Decider(std::shared_ptr<Policy> policy, Steps& steps, Residency& residency);
  virtual ~Decider() = default;
  Decider(const Decider&) = delete;
  Decider& operator=(const Decider&) = delete;

  // The policy is not asked about storages with fewer bytes.
  [[nodiscard]] std::uint64_t least_bytes() const { return least_bytes_; }

  // Whether `decide` may be given this recipe.
  [[nodiscard]] virtual bool may_compute(const GraphRecipe& /*recipe*/) { return true; }

  // Called when a guard ends.
  virtual void guard_ended() noexcept {}

  // From now on the memory of leaves may be taken away between their uses: FSDP, ZeRO.
  virtual void leaves_may_be_sharded() {}

  // Whether `decide` is to be given recipes.
  [[nodiscard]] bool needs_recipes() const { return needs_recipes_; }

  // What becomes of the storage of `tensor`, which is saved for the first time in this version and now enters `step`.
  // `recipe`: how to make the storage's bytes again; null where there is no recipe, or none was looked for. Throws what
  // the policy throws, and c10::Error where a budget cannot be met.
  [[nodiscard]] Decision decide(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step,
                                const GraphRecipe* recipe);

  // How the bytes of a save count that is too small for the policy to be asked about.
  [[nodiscard]] virtual DeviceAccount::Held::What passed_through() const = 0;

  // Says that no block was free for a storage of so many bytes that was to be offloaded.
  virtual void found_no_room(SavedStep& step, std::uint64_t bytes) = 0;

  // What is decided about a checkpointed region, and its place in the step.
  struct RegionsPlace {
    bool stays;                              // whether the region's saves stay on the device
    std::shared_ptr<StepRecorder> recorder;  // of the step; null for none
    std::uint32_t index;                     // of the region, in the recorder's record
    std::uint32_t ordinal;                   // as Candidate::ordinal
  };
  // Says that a checkpointed region begins that has saved `inputs`. nullopt: nothing is decided about regions, and each
  // runs its function a second time.
  [[nodiscard]] virtual std::optional<RegionsPlace> region_begins(const std::vector<at::Tensor>& inputs,
                                                                  SavedStep& step) = 0;

  // Says that a backward pass begins on this thread, probably on `step`. Returns whether the first copies in should
  // start at once.
  [[nodiscard]] virtual bool backward_begins(SavedStep& step) = 0;

  // Says that the backward pass on `step` is over; `failed`: by an exception. Waits for the device if the step is
  // recorded.
  virtual void backward_is_over(SavedStep& step, bool failed) = 0;

  // The bound for managed storages until there is a plan, where a plan is to set it; else nullopt.
  [[nodiscard]] virtual std::optional<std::uint64_t> first_managed_bytes() { return std::nullopt; }

  // Says that plans are to set the bound of these storages, or that more are managed among them.
  virtual void plans_bound_of(const std::shared_ptr<ManagedSet>& /*managed*/) {}

  // See Offloader.
  [[nodiscard]] virtual std::string explain() = 0;
  [[nodiscard]] virtual std::optional<PlanReport> plan_report() = 0;

  // What the user should know at the offloader's end, a sentence each.
  [[nodiscard]] virtual std::vector<std::string> warnings(const Stats& stats) = 0;

 protected:
  // Gives the candidate its ordinal and asks the policy.
  [[nodiscard]] Decision ask_locked(Candidate& candidate, SavedStep& step) EBB_REQUIRES(policy_mutex_);

  [[nodiscard]] Steps& steps() { return steps_; }
  [[nodiscard]] Residency& residency() { return residency_; }
  [[nodiscard]] const Policy& policy() const { return *policy_; }

  Mutex policy_mutex_;

 private:
  // Called with policy_mutex_ held: when a step begins; when the policy has decided, so that its plan is known; when a
  // storage enters the step as `candidate`.
  virtual void step_begins_locked(SavedStep& /*step*/) EBB_REQUIRES(policy_mutex_) {}
  virtual void decided_locked(SavedStep& /*step*/) EBB_REQUIRES(policy_mutex_) {}
  virtual void enter_locked(const at::Tensor& /*tensor*/, SavedStorage& /*saved*/, SavedStep& /*step*/,
                            const GraphRecipe* /*recipe*/, const Candidate& /*candidate*/) EBB_REQUIRES(policy_mutex_) {
  }

  // Called without policy_mutex_, once the candidate with this ordinal has been decided about.
  virtual void decided(SavedStep& /*step*/, std::uint32_t /*ordinal*/) {}

  const std::shared_ptr<Policy> policy_;
  Steps& steps_;
  Residency& residency_;
  const bool needs_operation_;
  const bool needs_recipes_;
  const std::uint64_t least_bytes_;
};

}  // namespace ebb
