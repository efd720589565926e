#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/accounts/device_account.h"
#include "offload/autograd/guard_scope.h"
#include "offload/plans/plan_follower.h"
#include "offload/recording/step_recorder.h"
#include "offload/saving/region_saves.h"
#include "offload/saving/runtime.h"

namespace ebb {

// A checkpointed region's part in a step under a budget: a candidate of the policy, and an entry in the step's record.
// The policy keeps the region, whose function then runs once and whose saves stay, or has the region recomputed. To the
// plan the region is one storage that has the bytes of all its saves; these bytes are known from the second run in the
// recorded steps.
//
// Threads: every member may be called from any thread; one SecondRun at a time.
class RegionInStep {
 public:
  // Asks the plans about a region that begins on the calling thread. Null where the offloader has no budget.
  [[nodiscard]] static std::unique_ptr<RegionInStep> ask(const GuardScope::Target& target,
                                                         const std::vector<at::Tensor>& inputs);
  ~RegionInStep();
  RegionInStep(const RegionInStep&) = delete;
  RegionInStep& operator=(const RegionInStep&) = delete;

  // Whether the region's saves stay on the device.
  [[nodiscard]] bool stays() const { return place_.stays; }

  // The table of the region's saves, for a region whose saves stay.
  [[nodiscard]] const std::shared_ptr<RegionSaves>& saves() const { return saves_; }

  [[nodiscard]] bool is_of(const Runtime& runtime) const { return runtime_.get() == &runtime; }

  [[nodiscard]] bool may_move(const at::Tensor& tensor) { return !runtime_->passed_through(tensor); }

  // Says that backward asks for a save of the region.
  void needed();

  // Lives during a second run of the function. A recorded step's clock pauses meanwhile.
  class SecondRun {
   public:
    explicit SecondRun(RegionInStep& region)
        : region_(region), pause_(region.place_.recorder.get(), region.place_.index) {}

    // Says how many bytes the second run has saved. These bytes count as held on the device from here on, until the
    // region ends.
    void saves(std::uint64_t bytes);

   private:
    RegionInStep& region_;
    const StepRecorder::ClockPause pause_;
  };

 private:
  RegionInStep(std::shared_ptr<Runtime> runtime, std::shared_ptr<SavedStep> step, PlanFollower::RegionsPlace place);

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<SavedStep> step_;
  const PlanFollower::RegionsPlace place_;
  const std::shared_ptr<RegionSaves> saves_;
  std::optional<DeviceAccount::Held> held_;
};

}  // namespace ebb
