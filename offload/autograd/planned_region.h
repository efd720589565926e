#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/autograd/guard_scope.h"
#include "offload/planning/step_recorder.h"
#include "offload/report/device_account.h"
#include "offload/runtime/region_saves.h"
#include "offload/runtime/runtime.h"

namespace ebb {

// A checkpointed region's part in a step that is planned: a candidate of the policy's, and what the step's record has
// of it. It is kept, which is to run plainly, or recomputed. To the plan it is one storage, of what its function saves,
// which is known from its second run in the recorded steps.
//
// Threads: every member may be called from any thread; one SecondRun at a time.
class PlannedRegion {
 public:
  // Null where the offloader does not plan.
  [[nodiscard]] static std::unique_ptr<PlannedRegion> ask(const GuardScope::Target& target,
                                                          const std::vector<at::Tensor>& inputs);
  ~PlannedRegion();
  PlannedRegion(const PlannedRegion&) = delete;
  PlannedRegion& operator=(const PlannedRegion&) = delete;

  // Whether what it saves stays on the device.
  [[nodiscard]] bool stays() const { return place_.stays; }

  // Of what it saves, if that stays.
  [[nodiscard]] const std::shared_ptr<RegionSaves>& saves() const { return saves_; }

  [[nodiscard]] bool is_of(const Runtime& runtime) const { return runtime_.get() == &runtime; }

  [[nodiscard]] bool may_move(const at::Tensor& tensor) { return !runtime_->passed_through(tensor); }

  // Backward asks for something that it saved.
  void needed();

  // Lives during a second run.
  class SecondRun {
   public:
    explicit SecondRun(PlannedRegion& region)
        : region_(region), detour_(region.place_.recorder.get(), region.place_.index) {}

    // What the run has saved: held from here on, until the region ends.
    void saves(std::uint64_t bytes);

   private:
    PlannedRegion& region_;
    const StepRecorder::ClockPause detour_;
  };

 private:
  PlannedRegion(std::shared_ptr<Runtime> runtime, std::shared_ptr<SavedStep> step, Decider::RegionsPlace place);

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<SavedStep> step_;
  const Decider::RegionsPlace place_;
  const std::shared_ptr<RegionSaves> saves_;
  std::optional<DeviceAccount::Held> held_;
};

}  // namespace ebb
