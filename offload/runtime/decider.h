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
class Residency;
class SavedStorage;
class StepRecorder;
class Steps;
class SavedStep;

// What becomes of the storages that are saved, and of checkpointed regions. Two strategies: a policy alone decides
// (PolicyDecider), or the plan of a budget (PlanDecider).
//
// Threads: every member may be called from any thread. The policy is never called from two threads at once.
class Decider {
 public:
  // `steps` and `residency` must outlive this.
  Decider(std::shared_ptr<Policy> policy, Steps& steps, Residency& residency);
  virtual ~Decider() = default;
  Decider(const Decider&) = delete;
  Decider& operator=(const Decider&) = delete;

  // Storages with fewer bytes are not asked about.
  [[nodiscard]] std::uint64_t least_bytes() const { return least_bytes_; }

  // Whether `decide` is to be given recipes.
  [[nodiscard]] bool needs_recipes() const { return needs_recipes_; }

  // What becomes of the storage of `tensor`, which is saved for the first time in this version and now enters `step`.
  // `recipe`: how to make it again; null where there is no way, or none was looked for. Throws what the policy throws,
  // and c10::Error where a budget cannot be met.
  [[nodiscard]] Decision decide(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step,
                                const GraphRecipe* recipe);

  // How the bytes of a save count that the policy is not asked about, for want of bytes.
  [[nodiscard]] virtual DeviceAccount::Held::What passed_through() const = 0;

  // A storage that was to be offloaded has found no room.
  virtual void found_no_room(SavedStep& step, std::uint64_t bytes) = 0;

  // A checkpointed region that has saved these inputs begins.
  struct RegionsPlace {
    bool stays;                              // what the region saves
    std::shared_ptr<StepRecorder> recorder;  // of the step; null for none
    std::uint32_t index;                     // in its record
    std::uint32_t ordinal;                   // as Candidate::ordinal
  };
  // nullopt: regions are nobody's affair but their own.
  [[nodiscard]] virtual std::optional<RegionsPlace> region_begins(const std::vector<at::Tensor>& inputs,
                                                                  SavedStep& step) = 0;

  // A backward begins on this thread, probably on this step. Whether the first copies in should start at once.
  [[nodiscard]] virtual bool backward_begins(SavedStep& step) = 0;

  // The backward pass on `step` is over; `failed`: by an exception. A step that is recorded waits for the device here.
  virtual void backward_is_over(SavedStep& step, bool failed) = 0;

  // See Offloader.
  [[nodiscard]] virtual std::string explain() = 0;
  [[nodiscard]] virtual std::optional<PlanReport> plan_report() = 0;

  // What the user should know at the offloader's end, a sentence each.
  [[nodiscard]] virtual std::vector<std::string> warnings(const Stats& stats) = 0;

 protected:
  // Asks the policy, whose mutex must be held.
  [[nodiscard]] Decision ask_locked(Candidate& candidate, SavedStep& step) EBB_REQUIRES(policy_mutex_);

  [[nodiscard]] Steps& steps() { return steps_; }
  [[nodiscard]] Residency& residency() { return residency_; }
  [[nodiscard]] const Policy& policy() const { return *policy_; }

  Mutex policy_mutex_;

 private:
  // Called with the mutex held: a step begins; the policy has decided, and so its plan is known; a storage with this
  // ordinal enters the step.
  virtual void step_begins_locked(SavedStep& /*step*/) EBB_REQUIRES(policy_mutex_) {}
  virtual void decided_locked(SavedStep& /*step*/) EBB_REQUIRES(policy_mutex_) {}
  virtual void enter_locked(const at::Tensor& /*tensor*/, SavedStorage& /*saved*/, SavedStep& /*step*/,
                            const GraphRecipe* /*recipe*/, const Candidate& /*candidate*/) EBB_REQUIRES(policy_mutex_) {
  }

  // Called without it, once it is known what becomes of this candidate.
  virtual void decided(SavedStep& /*step*/, std::uint32_t /*ordinal*/) {}

  const std::shared_ptr<Policy> policy_;
  Steps& steps_;
  Residency& residency_;
  const bool needs_operation_;
  const bool needs_recipes_;
  const std::uint64_t least_bytes_;
};

}  // namespace ebb
