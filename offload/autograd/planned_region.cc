#include "offload/autograd/planned_region.h"

#include <utility>

#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"

namespace ebb {

std::unique_ptr<PlannedRegion> PlannedRegion::ask(const GuardScope::Target& target,
                                                  const std::vector<at::Tensor>& inputs) {
  const std::shared_ptr<SavedStep> step = target.scope->step(target.runtime);
  std::optional<Decider::RegionsPlace> place = target.runtime->decider().region_begins(inputs, *step);
  if (!place) {
    return nullptr;
  }
  return std::unique_ptr<PlannedRegion>(new PlannedRegion(target.runtime, step, *std::move(place)));
}

PlannedRegion::PlannedRegion(std::shared_ptr<Runtime> runtime, std::shared_ptr<SavedStep> step,
                             Decider::RegionsPlace place)
    : runtime_(std::move(runtime)),
      step_(std::move(step)),
      place_(std::move(place)),
      saves_(new RegionSaves{.ordinal = place_.ordinal, .table = {}}) {}

PlannedRegion::~PlannedRegion() {
  if (runtime_->forked()) {
    return;
  }
  held_.reset();
  if (place_.recorder != nullptr) {
    place_.recorder->released(place_.index);
  }
  step_->ended();
}

void PlannedRegion::needed() {
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

void PlannedRegion::SecondRun::saves(std::uint64_t bytes) {
  region_.held_.reset();
  region_.held_.emplace(region_.runtime_->residency().ledger().hold(bytes, DeviceAccount::Held::What::kRecomputed));
  if (region_.place_.recorder != nullptr) {
    region_.place_.recorder->region_saves(region_.place_.index, bytes);
  }
}

}  // namespace ebb
