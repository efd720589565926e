#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/accounts/device_account.h"
#include "offload/autograd/guard_scope.h"
#include "offload/plans/plan_follower.h"
#include "offload/recording/step_recorder.h"

namespace ebb {

class Runtime;
struct RegionSaves;

// A checkpointed region's part in a step under a budget: a candidate of the policy, and an entry in the step's record.
// The policy keeps the region, whose function then runs once and whose saves stay, or has the region recomputed. To the
// plan the region is one storage that has the bytes of all its saves; these bytes are known from the second run in the
// recorded steps.
//
// Threads: every member may be called from any thread; one second run at a time.
class RegionInStep {
 public:
  // Asks the plans of the target's offloader, which must have some, about a region that begins on the calling thread.
  RegionInStep(const GuardScope::Target& target, const std::vector<at::Tensor>& inputs);
  ~RegionInStep();
  RegionInStep(const RegionInStep&) = delete;
  RegionInStep& operator=(const RegionInStep&) = delete;

  // Whether the region's saves stay on the device.
  [[nodiscard]] bool stays() const { return place_.stays; }

  // For a region whose saves stay: the table of those that are made for this runtime. Null for another runtime.
  [[nodiscard]] std::shared_ptr<RegionSaves> saves_for(const Runtime& runtime) const {
    return runtime_.get() == &runtime ? saves_ : nullptr;
  }

  // Says that backward asks for a save of the region.
  void needed();

  // Lives during a second run of the function: a recorded step's clock pauses.
  [[nodiscard]] StepRecorder::ClockPause pause() const {
    return StepRecorder::ClockPause(place_.recorder.get(), place_.index);
  }

  // Says, before the end of the pause, what the second run has saved from these inputs. The bytes of what may move
  // count as held on the device from here on, until the region ends.
  void second_run_saved(const std::vector<at::Tensor>& saved, const std::vector<at::Tensor>& inputs);

 private:
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<SavedStep> step_;
  const PlanFollower::RegionsPlace place_;
  const std::shared_ptr<RegionSaves> saves_;
  std::optional<DeviceAccount::Held> held_;
};

}  // namespace ebb
