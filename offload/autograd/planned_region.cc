#include "offload/autograd/planned_region.h"

#include <utility>

#include "offload/steps/tape.h"

namespace ebb {

std::unique_ptr<PlannedRegion> PlannedRegion::ask(const Scope::Target& target, const std::vector<at::Tensor>& inputs) {
  const std::shared_ptr<Tape> tape = target.scope->tape(target.runtime);
  std::optional<Decider::RegionsPlace> place = target.runtime->decider().region_begins(inputs, *tape);
  if (!place) {
    return nullptr;
  }
  return std::unique_ptr<PlannedRegion>(new PlannedRegion(target.runtime, tape, *std::move(place)));
}

PlannedRegion::PlannedRegion(std::shared_ptr<Runtime> runtime, std::shared_ptr<Tape> tape, Decider::RegionsPlace place)
    : runtime_(std::move(runtime)),
      tape_(std::move(tape)),
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
  tape_->ended();
}

void PlannedRegion::needed() {
  if (runtime_->forked()) {  // its second run says so
    return;
  }
  const bool planned = tape_->asked(place_.ordinal);
  if (place_.recorder != nullptr) {
    place_.recorder->needed(place_.index);
  }
  const StepRecorder::Detour detour(place_.recorder.get());
  if (planned && tape_->fetch_ahead()) {
    runtime_->tier().flush();
  }
}

void PlannedRegion::SecondRun::saves(std::uint64_t bytes) {
  region_.held_.reset();
  region_.held_.emplace(region_.runtime_->residency().ledger().hold(bytes));
  if (region_.place_.recorder != nullptr) {
    region_.place_.recorder->region_saves(region_.place_.index, bytes);
  }
}

}  // namespace ebb
