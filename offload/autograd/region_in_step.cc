#include "offload/autograd/region_in_step.h"

#include <utility>

#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"

namespace ebb {

std::unique_ptr<RegionInStep> RegionInStep::ask(const GuardScope::Target& target,
                                                const std::vector<at::Tensor>& inputs) {
  PlanFollower* const plans = target.runtime->plans();
  if (plans == nullptr) {
    return nullptr;
  }
  const std::shared_ptr<SavedStep> step = target.scope->step(target.runtime);
  return std::unique_ptr<RegionInStep>(new RegionInStep(target.runtime, step, plans->region_begins(inputs, *step)));
}

RegionInStep::RegionInStep(std::shared_ptr<Runtime> runtime, std::shared_ptr<SavedStep> step,
                           PlanFollower::RegionsPlace place)
    : runtime_(std::move(runtime)),
      step_(std::move(step)),
      place_(std::move(place)),
      saves_(new RegionSaves{.ordinal = place_.ordinal, .table = {}}) {}

RegionInStep::~RegionInStep() {
  if (runtime_->forked()) {
    return;
  }
  held_.reset();
  if (place_.recorder != nullptr) {
    place_.recorder->released(place_.index);
  }
  step_->ended();
}

void RegionInStep::needed() {
  if (runtime_->forked()) {  // the second run throws the error
    return;
  }
  const bool planned = step_->asked(place_.ordinal);
  if (place_.recorder != nullptr) {
    place_.recorder->needed(place_.index);
  }
  const StepRecorder::ClockPause pause(place_.recorder.get());
  if (planned && step_->prefetch(&SavedStorage::start_prefetch)) {
    runtime_->tier().flush();
  }
}

void RegionInStep::SecondRun::saves(std::uint64_t bytes) {
  region_.held_.reset();
  region_.held_.emplace(region_.runtime_->residency().ledger().hold(bytes, DeviceAccount::Held::What::kRecomputed));
  if (region_.place_.recorder != nullptr) {
    region_.place_.recorder->region_saves(region_.place_.index, bytes);
  }
}

}  // namespace ebb
