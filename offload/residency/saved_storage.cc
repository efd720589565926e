#include "offload/residency/saved_storage.h"

#include <utility>

#include <c10/util/Exception.h>

#include "offload/base/log.h"
#include "offload/planning/step_recorder.h"
#include "offload/residency/recipe.h"
#include "offload/residency/residency.h"
#include "offload/residency/tape.h"

namespace ebb {

SavedStorage::Use::Use(std::shared_ptr<SavedStorage> storage) : storage_(std::move(storage)) {
  const std::lock_guard lock(storage_->mutex_);
  ++storage_->uses_;
  ++storage_->pending_;
}

SavedStorage::Use::~Use() {
  if (storage_->residency_->forked()) {  // the lock may never be released here
    return;
  }
  std::vector<std::shared_ptr<Fetched>> no_longer_needed;  // destroyed after the lock is released
  const std::lock_guard lock(storage_->mutex_);
  --storage_->uses_;
  if (seen_ != storage_->round_) {
    --storage_->pending_;
  }
  if (storage_->pending_ == 0) {
    no_longer_needed = storage_->let_go();
  }
}

c10::Storage SavedStorage::Use::get() {
  storage_->residency_->check_process();
  const HostRange range(storage_->residency_->trace(), "unpack", storage_->bytes_);
  return storage_->get_recorded(*this);
}

SavedStorage::SavedStorage(std::shared_ptr<Residency> residency, std::shared_ptr<Tape> tape, c10::Storage source,
                           c10::VariableVersion version)
    : residency_(std::move(residency)),
      tape_(std::move(tape)),
      bytes_(source.nbytes()),
      source_(source.getWeakStorageImpl()),
      source_identity_(source.unsafeGetStorageImpl()),
      source_data_(source.data()),
      version_(std::move(version)),
      if_kept_(residency_->ledger().if_kept().hold(bytes_)),
      kept_(std::move(source)),
      on_device_(std::make_shared<Gauge::Lease>(residency_->ledger().on_device().hold(bytes_))),
      source_lease_(on_device_) {}

SavedStorage::~SavedStorage() {
  if (put_off_) {
    residency_->ledger().count_kept(Kept::kPutOff, bytes_);
  }
  residency_->table().erase(source_identity_, this);
  if (evictable_) {
    residency_->evictable().remove(*evictable_);
  }
  residency_->stash().sweep();
  if (recorder_ != nullptr) {
    recorder_->released(index_in_record_);
  }
  tape_->ended(on_tape_ ? std::optional(Tape::Gone{*on_tape_, bytes_}) : std::nullopt);
}

void SavedStorage::enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder,
                              std::uint32_t index_in_record) {
  const std::lock_guard lock(mutex_);  // another thread may share the storage already
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

void SavedStorage::may_be_evicted(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  evictable_ = residency_->evictable().add(weak_from_this(), stream);
}

void SavedStorage::send_out(Block block, c10::Stream stream) {
  const StepRecorder::Detour detour(recorder_.get());
  Leaving leaving;
  {
    const std::lock_guard lock(mutex_);
    leaving = start_out(std::move(block), stream, Tape::Went::kAtItsSave);
  }
  residency_->ledger().count_offloaded(bytes_);
  if (in_force(WaitPoint::kSourceInStash)) {
    residency_->stash().hold(std::move(leaving.source), std::move(leaving.on_device), leaving.left, stream,
                             residency_->bounds().stash(*tape_, ordinal_));
  }
}

bool SavedStorage::evict(c10::Stream stream) {
  if (this == fetching_here()) {
    return false;
  }
  Leaving leaving;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || state_ != State::kKept || put_off_ || kept_.use_count() != 1 || kept_.nbytes() != bytes_ ||
        kept_.data() != source_data_) {
      return false;
    }
    std::optional<Block> block = residency_->tier().try_acquire(bytes_);
    if (!block) {
      return false;
    }
    leaving = start_out(*std::move(block), stream, Tape::Went::kLater);
    if (evictable_) {
      residency_->evictable().remove(*std::exchange(evictable_, std::nullopt));
    }
  }
  residency_->ledger().count_evicted(bytes_);
  if (in_force(WaitPoint::kSourceInStash)) {
    residency_->stash().hold(std::move(leaving.source), std::move(leaving.on_device), leaving.left, stream,
                             /*limit_bytes=*/0);
  }
  return true;
}

// LOCK: mutex_. kKept -> kAway
SavedStorage::Leaving SavedStorage::start_out(Block block, c10::Stream stream, Tape::Went when) {
  Tier& tier = residency_->tier();
  // The copy reads what the stream has computed, and writes where an earlier owner's copies may still be reading or
  // writing (R3, R7 in docs/design.md).
  tier.made(stream, source_data_, bytes_);
  After after(WaitPoint::kOutAfterCompute, stream);
  after.add(WaitPoint::kOutAfterBlockUsers, block.gates());
  left_ = tier.copy_out(block, source_data_, after);
  block.gate(WaitPoint::kOutGatesBlock, left_);
  block_.emplace(std::move(block));
  state_ = State::kAway;
  on_tape_ = tape_->append(weak_from_this(), bytes_, stream, ordinal_, when);
  return {std::exchange(kept_, {}), std::exchange(on_device_, nullptr), left_};
}

void SavedStorage::drop(std::unique_ptr<Recipe> recipe) {
  std::shared_ptr<Gauge::Lease> on_device;  // destroyed after what it counts, and that after the lock is released
  c10::Storage source;
  const std::lock_guard lock(mutex_);
  recipe_ = std::move(recipe);
  state_ = State::kAway;
  source = std::exchange(kept_, {});
  on_device = std::exchange(on_device_, nullptr);
}

bool SavedStorage::source_has_changed() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kKept) {
    return kept_.nbytes() != bytes_ || kept_.data() != source_data_;
  }
  return state_ == State::kBack && back_->is_source() && was_swapped(*back_->storage().unsafeGetStorageImpl());
}

int SavedStorage::recipe_depth() {
  const std::lock_guard lock(mutex_);
  return recipe_ == nullptr ? 0 : recipe_->depth();
}

void SavedStorage::check_process() const { residency_->check_process(); }

const c10::Storage& SavedStorage::no_bytes() const { return residency_->no_bytes(); }

void SavedStorage::send_out_later(Block block, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  put_off_.emplace(PutOffCopy{std::move(block), stream});
}

void SavedStorage::send_out_now() noexcept {
  if (residency_->forked()) {
    return;
  }
  bool captures = true;  // where that cannot be told, it stays
  try {
    captures = residency_->tier().captures();
  } catch (...) {
  }
  std::optional<PutOffCopy> copy;
  bool resized = false;  // in the meantime: what it holds now is what the saves get
  {
    const std::lock_guard lock(mutex_);
    copy = std::exchange(put_off_, std::nullopt);
    resized = kept_.nbytes() != bytes_ || kept_.data() != source_data_;
  }
  if (copy && !resized && !captures) {
    try {
      send_out(std::move(copy->block), copy->stream);
      return;
    } catch (...) {
      log_warning("a copy out could not be started; the saved tensor stays on the device");
    }
  }
  residency_->ledger().count_kept(Kept::kPutOff, bytes_);
}

}  // namespace ebb
