#include "offload/steps/saved_storage.h"

#include <utility>

#include "offload/base/backward_pass.h"
#include "offload/recording/step_recorder.h"
#include "offload/residency/recipe.h"
#include "offload/residency/residency.h"
#include "offload/steps/steps.h"

namespace ebb {

SavedStorage::Use::Use(std::shared_ptr<SavedStorage> storage) : storage_(std::move(storage)) {
  const MutexLock lock(storage_->mutex_);
  ++storage_->uses_;
  ++storage_->pending_;
}

SavedStorage::Use::~Use() {
  if (storage_->residency()->forked()) {  // in a child the lock may be held forever
    return;
  }
  DeviceCopies no_longer_needed;  // destroyed after the lock is released
  const MutexLock lock(storage_->mutex_);
  --storage_->uses_;
  if (seen_ != storage_->round_) {
    --storage_->pending_;
  }
  if (storage_->pending_ == 0) {
    no_longer_needed = storage_->end_round_locked();
  }
}

c10::Storage SavedStorage::Use::get() {
  storage_->residency()->check_process();
  const HostRange range(storage_->residency()->trace(), "unpack", storage_->bytes());
  return storage_->get(*this);
}

SavedStorage::SavedStorage(std::shared_ptr<Residency> residency, Steps& steps, std::shared_ptr<SavedStep> step,
                           c10::Storage source, c10::VariableVersion version)
    : TieredStorage(std::move(residency), std::move(source)),
      steps_(steps),
      step_(std::move(step)),
      version_(std::move(version)),
      if_kept_(this->residency()->ledger().if_kept().hold(bytes())) {
  step_->began();
}

SavedStorage::~SavedStorage() {
  steps_.table().erase(source_identity(), this);
  residency()->stash().sweep();
  if (recorder_ != nullptr) {
    recorder_->released(index_in_record_);
  }
  step_->ended(step_id_ ? std::optional(SavedStep::Gone{*step_id_, bytes()}) : std::nullopt);
}

void SavedStorage::enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder,
                              std::uint32_t index_in_record) {
  const MutexLock lock(mutex_);  // another thread may share the storage already
  ordinal_ = ordinal;
  recorder_ = std::move(recorder);
  index_in_record_ = index_in_record;
}

void SavedStorage::stays() {
  if (recorder_ != nullptr) {
    recorder_->kept(index_in_record_);
  }
}

std::optional<std::uint32_t> SavedStorage::index_in(const StepRecorder& recorder) const {
  return recorder_.get() == &recorder ? std::optional(index_in_record_) : std::nullopt;
}

void SavedStorage::offload(Block block, c10::Stream stream) {
  const StepRecorder::ClockPause pause(recorder_.get());
  TieredStorage::offload(std::move(block), stream);
}

void SavedStorage::leaves_locked(c10::Stream stream, Leaves when) {
  if (!step_id_) {
    step_id_ = step_->append(weak_from_this(), bytes(), stream, ordinal_,
                             when == Leaves::kAtItsSave ? SavedStep::Went::kAtItsSave : SavedStep::Went::kLater);
  }
}

std::uint64_t SavedStorage::stash_limit_bytes() const { return steps_.stash_limit_after(*step_, ordinal_); }

c10::Storage SavedStorage::get(Use& use) {
  std::shared_ptr<StepRecorder> recorder;
  {
    const MutexLock lock(mutex_);
    recorder = recorder_;
  }
  if (recorder != nullptr && !Recipe::runs_here()) {
    recorder->needed(index_in_record_);
  }
  const StepRecorder::ClockPause pause(recorder.get());
  return get_on(residency()->tier().current_stream(), use);
}

c10::Storage SavedStorage::get_on(c10::Stream stream, Use& use) {
  const int pass = backward_here();
  c10::Storage storage;
  std::uint32_t ordinal = SavedStep::kNotPlanned;
  bool again = false;
  {
    const MutexLock lock(mutex_);
    if (residency()->tier().captures()) {
      return get_for_capture_locked();
    }
    const bool same_pass = std::exchange(use.seen_by_, pass) == pass;
    again = same_pass && use.seen_ != 0 && use.seen_ + 1 >= round_;
    if (is_resident_locked()) {
      storage = resident_locked();
    } else if (again && is_off_device_locked()) {
      if (std::optional<c10::Storage> known = handed_out_on_locked(stream)) {
        residency()->ledger().counters().reused.add(bytes());
        return *std::move(known);
      }
    }
    ordinal = ordinal_;
  }
  const bool resident = storage;
  bool device_is_full = false;
  if (resident) {
    step_->begin_use();
  } else {
    storage = find(stream, device_is_full);
    const bool first = mark_used(use, storage, stream);
    if (has_recipe()) {
      step_->begin_use();
    } else if (first && !again) {
      step_->used(*step_id_);
    }
  }
  // Inside a recipe backward has asked for the recipe's result, and not for this storage.
  const bool planned = !Recipe::runs_here() && step_->asked(ordinal);
  if (resident && !planned) {  // Note [Before the first use] in stall_monitor.h
    return storage;
  }
  if (!device_is_full && step_->prefetch()) {
    residency()->tier().flush();  // no further copy will join the batch
  }
  residency()->stash().sweep();
  return storage;
}

// The pause names the storage, so that the record takes the pause's length as the recipe's time.
c10::Storage SavedStorage::run(Recipe& recipe) {
  const StepRecorder::ClockPause pause(recorder_.get(), index_in_record_);
  return TieredStorage::run(recipe);
}

// Every save has got the bytes in this round, so the copy on the device has no use until a save asks again.
SavedStorage::DeviceCopies SavedStorage::end_round_locked() noexcept {
  ++round_;
  pending_ = uses_;
  return release_locked();
}

// Notes the use, and releases the copy on the device after the last pending use. Returns whether the step has yet to
// hear of a use in this round.
bool SavedStorage::mark_used(Use& use, const c10::Storage& storage, c10::Stream stream) {
  DeviceCopies no_longer_needed;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  remember_locked(storage, stream);
  const bool first = std::exchange(told_round_, round_) != round_;
  if (use.seen_ != round_) {
    use.seen_ = round_;
    --pending_;
  }
  if (pending_ == 0 || !in_force(WaitPoint::kPendingUses)) {
    no_longer_needed = end_round_locked();
  }
  return first;
}

}  // namespace ebb
