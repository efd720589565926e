#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "offload/planning/plan_lifecycle.h"
#include "offload/runtime/decider.h"

namespace ebb {

// Under a budget steps are recorded, a plan is made from the records, and the plan decides, about the bound of managed
// storages too if the program has left that open.
//
// Threads: as Decider.
class PlanDecider final : public Decider {
 public:
  // `policy`: the PlannedPolicy of `lifecycle`.
  PlanDecider(std::shared_ptr<Policy> policy, std::unique_ptr<PlanLifecycle> lifecycle, Steps& steps,
              Residency& residency);

  // Where leaves may be sharded, what is computed from leaves only once a guard has ended with their memory in place.
  // FSDP2 frees a parameter's memory after the forward pass of the parameter's module, and fills memory again before
  // the module's backward: without a new version, and maybe at the same address, before the bytes are there. Managed
  // bytes come back by themselves.
  [[nodiscard]] bool may_compute(const GraphRecipe& recipe) override;
  void guard_ended() noexcept override;
  void leaves_may_be_sharded() override { leaves_may_be_sharded_ = true; }

  [[nodiscard]] DeviceAccount::Held::What passed_through() const override {
    return DeviceAccount::Held::What::kPassedThroughBesidePlan;
  }

  // Warns once that the budget may be exceeded. Later plans offload no more than there is when backward begins.
  void found_no_room(SavedStep& step, std::uint64_t bytes) override;

  [[nodiscard]] std::optional<RegionsPlace> region_begins(const std::vector<at::Tensor>& inputs,
                                                          SavedStep& step) override;

  // Shrinks the stash to what the plan's schedule allows in backward. Returns true under a plan, unless another of the
  // thread's steps is in use, which needs the window.
  [[nodiscard]] bool backward_begins(SavedStep& step) override;
  void backward_is_over(SavedStep& step, bool failed) override;

  [[nodiscard]] std::optional<std::uint64_t> first_managed_bytes() override;
  void plans_bound_of(const std::shared_ptr<ManagedSet>& managed) override;

  [[nodiscard]] std::string explain() override;
  [[nodiscard]] std::optional<PlanReport> plan_report() override;

  // None: recorded steps move whatever they can, and the others what the budget asks for.
  [[nodiscard]] std::vector<std::string> warnings(const Stats& /*stats*/) override { return {}; }

 private:
  void step_begins_locked(SavedStep& step) EBB_REQUIRES(policy_mutex_) override;
  void decided_locked(SavedStep& step) EBB_REQUIRES(policy_mutex_) override;
  void enter_locked(const at::Tensor& tensor, SavedStorage& saved, SavedStep& step, const GraphRecipe* recipe,
                    const Candidate& candidate) EBB_REQUIRES(policy_mutex_) override;
  void decided(SavedStep& step, std::uint32_t ordinal) override;
  void set_bound_locked(const std::shared_ptr<const Plan>& plan) EBB_REQUIRES(policy_mutex_);
  void lower_first_bound(ManagedSet& managed);
  [[nodiscard]] std::shared_ptr<ManagedSet> managed();
  [[nodiscard]] ManagedSet* managed_locked() EBB_REQUIRES(policy_mutex_);
  [[nodiscard]] RegionsPlace enter_region_locked(Candidate& candidate,
                                                 const std::vector<std::shared_ptr<SavedStorage>>& inputs,
                                                 SavedStep& step) EBB_REQUIRES(policy_mutex_);

  // A leaf whose memory recipes would compute from.
  struct Leaf {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    std::optional<bool> stays = {};  // whether the memory was there at the end of each guard so far
  };

  const std::unique_ptr<PlanLifecycle> lifecycle_;
  std::atomic<bool> leaves_may_be_sharded_{false};
  Mutex leaves_mutex_;
  std::unordered_map<const c10::StorageImpl*, Leaf> leaves_ EBB_GUARDED_BY(leaves_mutex_);
  std::weak_ptr<ManagedSet> managed_ EBB_GUARDED_BY(policy_mutex_);  // whose bound plans set; null for none
  // While the lock is held, so that the set does not end under the lock; let go of by decided().
  std::shared_ptr<ManagedSet> held_ EBB_GUARDED_BY(policy_mutex_);
  std::atomic<bool> is_held_{false};
  std::shared_ptr<const Plan> bound_by_ EBB_GUARDED_BY(policy_mutex_);  // the plan that set the bound; null: none
  std::atomic<bool> is_over_bound_{false};                              // managed storages may be
  std::atomic<bool> found_no_room_{false};                              // since backward last began
  std::atomic<bool> warned_of_no_room_{false};
};

}  // namespace ebb
