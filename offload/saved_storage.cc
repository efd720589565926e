#include "offload/saved_storage.h"

#include <utility>

#include <c10/util/Exception.h>

#include "offload/core.h"
#include "offload/log.h"
#include "offload/recipe.h"
#include "offload/step_recorder.h"
#include "offload/tape.h"
#include "streams/checked_tier.h"

namespace ebb {

SavedStorage::Use::Use(std::shared_ptr<SavedStorage> storage) : storage_(std::move(storage)) {
  const std::lock_guard lock(storage_->mutex_);
  ++storage_->uses_;
  ++storage_->pending_;
}

SavedStorage::Use::~Use() {
  if (storage_->core_->forked()) {  // the lock may never be released here
    return;
  }
  std::shared_ptr<Fetched> no_longer_needed;  // destroyed after the lock is released
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
  storage_->core_->check_process();
  const HostRange range(storage_->core_->trace(), "unpack", storage_->bytes_);
  return storage_->get_recorded(*this);
}

SavedStorage::SavedStorage(std::shared_ptr<Core> core, std::shared_ptr<Tape> tape, c10::Storage source,
                           c10::VariableVersion version)
    : core_(std::move(core)),
      tape_(std::move(tape)),
      bytes_(source.nbytes()),
      source_(source.getWeakStorageImpl()),
      source_identity_(source.unsafeGetStorageImpl()),
      source_data_(source.data()),
      version_(std::move(version)),
      kept_(std::move(source)),
      on_device_(std::make_shared<Gauge::Lease>(core_->on_device().hold(bytes_))),
      source_lease_(on_device_) {}

SavedStorage::~SavedStorage() {
  if (put_off_) {
    core_->count_kept(Kept::kPutOff, bytes_);
  }
  core_->forget(*this);
  core_->stash().sweep();
  if (recorder_ != nullptr) {
    recorder_->released(index_in_record_);
  }
  tape_->ended();
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

void SavedStorage::send_out(Block block, c10::Stream stream) {
  const StepRecorder::Detour detour(recorder_.get());
  Tier& tier = core_->tier();
  std::unique_lock lock(mutex_);
  // The copy reads what the stream has computed, and writes where an earlier owner's copies may still be reading or
  // writing (R3, R7 in docs/design.md).
  observe_made(tier, stream, source_data_, bytes_);
  After after(WaitPoint::kOutAfterCompute, stream);
  after.add(WaitPoint::kOutAfterBlockUsers, block.gates());
  left_ = tier.copy_out(block, source_data_, after);
  block.gate(WaitPoint::kOutGatesBlock, left_);
  block_.emplace(std::move(block));
  state_ = State::kAway;
  c10::Storage source = std::exchange(kept_, {});
  std::shared_ptr<Gauge::Lease> on_device = std::exchange(on_device_, nullptr);
  position_ = tape_->append(weak_from_this(), bytes_, stream, ordinal_);
  const Ticket left = left_;
  lock.unlock();
  core_->count_offloaded(bytes_);
  if (!in_force(WaitPoint::kSourceInStash)) {
    return;
  }
  core_->stash().hold(std::move(source), std::move(on_device), left, stream, core_->stash_limit(*tape_, ordinal_));
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

int SavedStorage::recipe_depth() {
  const std::lock_guard lock(mutex_);
  return recipe_ == nullptr ? 0 : recipe_->depth();
}

void SavedStorage::check_process() const { core_->check_process(); }

const c10::Storage& SavedStorage::no_bytes() const { return core_->no_bytes(); }

void SavedStorage::send_out_later(Block block, c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  put_off_.emplace(PutOffCopy{std::move(block), stream});
}

void SavedStorage::send_out_now() noexcept {
  if (core_->forked()) {
    return;
  }
  std::optional<PutOffCopy> copy;
  bool resized = false;  // in the meantime: what it holds now is what the saves get
  {
    const std::lock_guard lock(mutex_);
    copy = std::exchange(put_off_, std::nullopt);
    resized = kept_.nbytes() != bytes_ || kept_.data() != source_data_;
  }
  if (copy && !resized) {
    try {
      send_out(std::move(copy->block), copy->stream);
      return;
    } catch (...) {
      log_warning("a copy out could not be started; the saved tensor stays on the device");
    }
  }
  core_->count_kept(Kept::kPutOff, bytes_);
}

c10::Storage SavedStorage::get_recorded(Use& use) {
  std::shared_ptr<StepRecorder> recorder;
  {
    const std::lock_guard lock(mutex_);
    recorder = recorder_;
  }
  if (recorder != nullptr && !Recipe::runs_here()) {
    recorder->needed(index_in_record_);
  }
  const StepRecorder::Detour detour(recorder.get());
  return get(use);
}

c10::Storage SavedStorage::get(Use& use) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kKept) {
      tape_->begin_use();
      return kept_;
    }
  }
  const c10::Stream stream = core_->tier().current_stream();
  c10::Storage storage;
  bool device_is_full = false;
  try {
    storage = find(stream);
  } catch (const c10::OutOfMemoryError&) {
    if (Recipe::runs_here()) {  // whoever asked first tries again, or each recipe inside another would double the tries
      throw;
    }
    device_is_full = true;
    core_->make_room_on_device();
    storage = find(stream);
  }
  const bool first = mark_used(use);
  if (recipe_ != nullptr) {
    tape_->begin_use();
  } else if (first) {
    tape_->used(position_);
  }
  if (!device_is_full && tape_->fetch_ahead()) {
    core_->tier().flush();  // nothing more will join what has been gathered
  }
  core_->stash().sweep();
  return storage;
}

// Of a storage that went away: on the device and ready for work on `stream`.
c10::Storage SavedStorage::find(c10::Stream stream) {
  std::shared_ptr<Fetched> fetched;
  c10::Storage storage;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kBack && (back_->stream() == stream || !in_force(WaitPoint::kOwnStream))) {
      fetched = back_;
      fetched->asked_for();
    } else if (std::optional<c10::Storage> source = live_source()) {
      storage = *std::move(source);
      core_->counters().reused.add(bytes_);
    } else if (recipe_ != nullptr) {
      // below, without the lock
    } else if (state_ == State::kBack) {
      fetched = fetch(stream, {});  // another stream asks than the one that owns the copy: it gets its own (R4, R5)
    } else {
      back_ = fetch(stream, {});
      back_->asked_for();
      state_ = State::kBack;
      fetched = back_;
    }
  }
  // The lock is released: on the CPU this may take as long as the disk does.
  if (fetched != nullptr) {
    return wait_for(fetched);
  }
  return storage ? storage : recompute(stream);
}

c10::Storage SavedStorage::recompute(c10::Stream stream) {
  const std::lock_guard one_at_a_time(recompute_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kBack && back_->stream() == stream) {  // by another thread, meanwhile
      return back_->get();
    }
  }
  const HostRange range(core_->trace(), "recompute", bytes_);
  c10::Storage storage;
  {
    const StepRecorder::Detour detour(recorder_.get(), index_in_record_);
    storage = recipe_->run();
  }
  storage.set_data_ptr_noswap(core_->counted(std::move(storage.mutable_data_ptr()), bytes_));
  core_->counters().recomputed.add(bytes_);
  auto made = std::make_shared<Fetched>(core_->tier(), storage, Ticket{}, stream, nullptr, Gauge::Lease{});
  const std::lock_guard lock(mutex_);
  if (state_ == State::kAway) {
    back_ = std::move(made);
    state_ = State::kBack;
    back_->asked_for();
  }
  return storage;
}

c10::Storage SavedStorage::wait_for(const std::shared_ptr<Fetched>& fetched) {
  try {
    if (fetched->is_source()) {
      core_->counters().reused.add(bytes_);
    }
    return fetched->get();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (back_ == fetched) {  // whoever asks next tries again
      back_ = nullptr;
      state_ = State::kAway;
    }
    throw;
  }
}

// Room for a fetch of so many bytes more on the device.
bool SavedStorage::take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room) {
  if (!held_bytes) {
    return core_->window().try_hold(bytes_, core_->window_limit(), room);
  }
  if (core_->storages_on_device() + bytes > *held_bytes) {
    return false;
  }
  room = core_->window().hold(bytes_);
  return true;
}

bool SavedStorage::fetch_ahead(std::optional<std::uint64_t> held_bytes) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kAway) {
    return true;
  }
  const c10::Stream stream = core_->tier().current_stream();
  if (std::optional<c10::Storage> source = live_source()) {
    // Where steps wait for copies, what the stash still has takes no room in the window: it would fill it, and no copy
    // would start.
    const std::uint64_t more = source_lease_.expired() ? bytes_ : 0;  // if others have it, it would go without ebb
    const bool beside_window = !held_bytes && core_->sources_beside_window();
    Gauge::Lease room;
    if (beside_window ? !core_->retained().try_hold(bytes_, core_->stash_limit(), room)
                      : !take_room(more, held_bytes, room)) {
      return beside_window;  // somebody else has it: perhaps for long enough
    }
    back_ =
        std::make_shared<Fetched>(core_->tier(), *std::move(source), Ticket{}, stream, device_lease(), std::move(room));
  } else {
    Gauge::Lease window;
    if (!take_room(bytes_, held_bytes, window)) {
      return false;
    }
    try {
      back_ = fetch(stream, std::move(window));
    } catch (const std::exception&) {  // a wish, not a need: when it is needed, it is asked for again
      return false;
    }
  }
  state_ = State::kBack;
  return true;
}

void SavedStorage::drop_guess() {
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  if (state_ == State::kBack && back_->is_guess()) {
    unwanted = std::exchange(back_, nullptr);
    state_ = State::kAway;
  }
}

// kBack -> kAway: every save has had the bytes in this round, so the device copy has no use until one asks again.
std::shared_ptr<Fetched> SavedStorage::let_go() {
  ++round_;
  pending_ = uses_;
  if (state_ == State::kBack) {
    state_ = State::kAway;
  }
  return std::exchange(back_, nullptr);
}

// Whether this was the round's first use. After the last pending one the device copy goes.
bool SavedStorage::mark_used(Use& use) {
  std::shared_ptr<Fetched> no_longer_needed;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const bool first = std::exchange(told_round_, round_) != round_;
  if (use.seen_ != round_) {
    use.seen_ = round_;
    --pending_;
  }
  if (pending_ == 0 || !in_force(WaitPoint::kPendingUses)) {
    no_longer_needed = let_go();
  }
  return first;
}

// The source, if somebody still has it with the bytes that were saved (a resized or swapped storage has others).
std::optional<c10::Storage> SavedStorage::live_source() const {
  c10::intrusive_ptr<c10::StorageImpl> source = source_.lock();
  if (!source || source->nbytes() != bytes_ || source->data() != source_data_) {
    return std::nullopt;
  }
  return c10::Storage(std::move(source));
}

std::shared_ptr<Gauge::Lease> SavedStorage::device_lease() {
  std::shared_ptr<Gauge::Lease> lease = source_lease_.lock();
  return lease != nullptr ? lease : std::make_shared<Gauge::Lease>(core_->on_device().hold(bytes_));
}

std::shared_ptr<Fetched> SavedStorage::fetch(c10::Stream stream, Gauge::Lease window) {
  Tier& tier = core_->tier();
  c10::DataPtr data = tier.allocate(bytes_);
  // The memory may have been freed by the host while the stream still uses it (R5), and the block may still be being
  // written (R2).
  After after(WaitPoint::kInAfterMemory, stream);
  after.add(WaitPoint::kInAfterOut, left_);
  Ticket arrived = tier.copy_in(data.get(), *block_, after);
  block_->gate(WaitPoint::kInGatesBlock, arrived);
  core_->counters().fetched.add(bytes_);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes_, core_->counted(std::move(data), bytes_));
  return std::make_shared<Fetched>(tier, std::move(storage), std::move(arrived), stream, nullptr, std::move(window));
}

}  // namespace ebb
