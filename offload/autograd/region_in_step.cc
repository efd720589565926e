#include "offload/autograd/region_in_step.h"

#include <set>

#include "offload/base/autograd_info.h"
#include "offload/saving/runtime.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/saved_storage.h"

namespace ebb {

RegionInStep::RegionInStep(const GuardScope::Target& target, const std::vector<at::Tensor>& inputs)
    : runtime_(target.runtime),
      step_(target.scope->step(runtime_)),
      place_(runtime_->plans()->region_begins(inputs, *step_)),
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

void RegionInStep::second_run_saved(const std::vector<at::Tensor>& saved, const std::vector<at::Tensor>& inputs) {
  std::set<const c10::StorageImpl*> seen;  // each counts once, and the inputs' not at all
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.has_storage()) {
      seen.insert(input.storage().unsafeGetStorageImpl());
    }
  }
  std::uint64_t bytes = 0;
  for (const at::Tensor& each : saved) {
    const bool may_move = !runtime_->exclusions().reason(each, AutogradInfo(each));
    if (may_move && seen.insert(each.storage().unsafeGetStorageImpl()).second) {
      bytes += each.storage().nbytes();
    }
  }
  held_.reset();
  held_.emplace(runtime_->residency().ledger().hold(bytes, DeviceAccount::Held::What::kRecomputed));
  if (place_.recorder != nullptr) {
    place_.recorder->region_saves(place_.index, bytes);
  }
}

}  // namespace ebb
