#include "offload/residency/saved_storage.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "offload/base/backward_pass.h"
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
  DeviceCopies no_longer_needed;  // destroyed after the lock is released
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
      source_lease_(on_device_) {
  tape_->began();
}

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
  if (!on_tape_) {  // before the copy starts: from then on nothing may fail
    on_tape_ = tape_->append(weak_from_this(), bytes_, stream, ordinal_, when);
  }
  left_ = tier.copy_out(block, source_data_, after);
  block.gate(WaitPoint::kOutGatesBlock, left_);
  block_.emplace(std::move(block));
  state_ = State::kAway;
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

// The one that the calling thread has locked while it asks for device memory.
const SavedStorage*& SavedStorage::fetching_here() {
  thread_local const SavedStorage* fetching = nullptr;
  return fetching;
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
  const c10::Stream stream = residency_->tier().current_stream();
  const int pass = backward_here();
  c10::Storage storage;
  std::uint32_t ordinal = Tape::kNotPlanned;
  bool again = false;
  {
    const std::lock_guard lock(mutex_);
    if (residency_->tier().captures()) {
      return get_for_capture();
    }
    const bool same_pass = std::exchange(use.seen_by_, pass) == pass;
    again = same_pass && use.seen_ != 0 && use.seen_ + 1 >= round_;
    if (state_ == State::kKept) {
      storage = kept_;
    } else if (again && state_ == State::kAway) {
      if (std::optional<c10::Storage> known = handed_out_on(stream)) {
        residency_->ledger().counters().reused.add(bytes_);
        return *std::move(known);
      }
    }
    ordinal = ordinal_;
  }
  const bool kept = storage;
  bool device_is_full = false;
  if (kept) {
    tape_->begin_use();
  } else {
    storage = find_making_room(stream, device_is_full);
    const bool first = mark_used(use, storage, stream);
    if (recipe_ != nullptr) {
      tape_->begin_use();
    } else if (first && !again) {
      tape_->used(*on_tape_);
    }
  }
  // In a recipe, backward has asked for what is made from this.
  const bool planned = !Recipe::runs_here() && tape_->asked(ordinal);
  if (kept && !planned) {  // Note [Before the first use] in stall_watch.h
    return storage;
  }
  if (!device_is_full && tape_->fetch_ahead()) {
    residency_->tier().flush();  // nothing more will join what has been gathered
  }
  residency_->stash().sweep();
  return storage;
}

// LOCK: mutex_. What has not left the device: Note [CUDA graphs] in save_hook.h
c10::Storage SavedStorage::get_for_capture() const {
  std::optional<c10::Storage> there = state_ == State::kKept ? std::optional(kept_) : live_source();
  TORCH_CHECK(there,
              "ebb: backward is captured in a CUDA graph and asks for a tensor that was saved, and moved, before the "
              "capture began. Capture forward and backward together, or put a NoOpGuard around that forward pass.");
  return *std::move(there);
}

c10::Storage SavedStorage::find_making_room(c10::Stream stream, bool& device_is_full) {
  while (true) {
    try {
      return find(stream);
    } catch (const c10::OutOfMemoryError&) {
      // In a recipe whoever asked first tries again, or each recipe inside another would double the tries.
      if (Recipe::runs_here() || (residency_->evict(bytes_) == 0 && device_is_full)) {
        throw;
      }
      device_is_full = true;
    }
  }
}

// Of a storage that went away: on the device and ready for work on `stream`.
c10::Storage SavedStorage::find(c10::Stream stream) {
  std::shared_ptr<Fetched> fetched;
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  c10::Storage storage;
  {
    const std::lock_guard lock(mutex_);
    fetched = back_on(stream);
    if (fetched == nullptr) {
      if (std::optional<c10::Storage> known = handed_out_on(stream)) {
        storage = *std::move(known);
      } else if (std::optional<c10::Storage> source = live_source()) {
        storage = *std::move(source);
        lent_ = source_lease_.lock();
      }
      if (storage) {
        residency_->ledger().counters().reused.add(bytes_);
      } else if (recipe_ == nullptr) {
        fetched = fetch(stream, {});
        unwanted = comes_back(fetched);
      }
    }
    if (fetched != nullptr) {
      fetched->asked_for();
    }
  }
  // The lock is released: on the CPU this may take as long as the disk does.
  if (fetched != nullptr) {
    return wait_for(fetched);
  }
  return storage ? storage : recompute(stream);
}

// LOCK: mutex_. The copy that work on `stream` may use: its own, for another stream may be behind or ahead of it (R4,
// R5 in docs/design.md).
std::shared_ptr<Fetched> SavedStorage::back_on(c10::Stream stream) const {
  if (state_ != State::kBack) {
    return nullptr;
  }
  if (back_->stream() == stream || !in_force(WaitPoint::kOwnStream)) {
    return back_;
  }
  const auto found = std::ranges::find(elsewhere_, stream, &Fetched::stream);
  return found == elsewhere_.end() ? nullptr : *found;
}

// LOCK: mutex_. -> kBack. A guess for another stream, which nobody has asked for, makes place and is returned; a copy
// that was used stays for the other pending uses there.
std::shared_ptr<Fetched> SavedStorage::comes_back(std::shared_ptr<Fetched> fetched) {
  if (state_ == State::kBack && !back_->is_guess()) {
    elsewhere_.push_back(std::move(fetched));
    return nullptr;
  }
  state_ = State::kBack;
  return std::exchange(back_, std::move(fetched));
}

// LOCK: mutex_. Note [Asked for again]
std::optional<c10::Storage> SavedStorage::handed_out_on(c10::Stream stream) const {
  const auto found = std::ranges::find(handed_out_, stream, &HandedOut::stream);
  if (found == handed_out_.end()) {
    return std::nullopt;
  }
  c10::intrusive_ptr<c10::StorageImpl> storage = found->storage.lock();
  if (!storage || storage->nbytes() != bytes_ || storage->data() != found->data ||
      (Recipe::runs_here() && was_swapped(*storage))) {
    return std::nullopt;
  }
  return c10::Storage(std::move(storage));
}

// LOCK: mutex_
void SavedStorage::remember(const c10::Storage& storage, c10::Stream stream) {
  const auto known = std::ranges::find(handed_out_, stream, &HandedOut::stream);
  HandedOut& entry = known != handed_out_.end()
                         ? *known
                         : handed_out_.emplace_back(HandedOut{storage.getWeakStorageImpl(), nullptr, stream});
  if (entry.data != storage.data() || entry.storage.expired()) {
    entry.storage = storage.getWeakStorageImpl();
    entry.data = storage.data();
  }
}

c10::Storage SavedStorage::recompute(c10::Stream stream) {
  const std::lock_guard one_at_a_time(recompute_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (const std::shared_ptr<Fetched> back = back_on(stream)) {  // by another thread, meanwhile
      return back->get();
    }
  }
  const HostRange range(residency_->trace(), "recompute", bytes_);
  c10::Storage made;
  {
    const StepRecorder::Detour detour(recorder_.get(), index_in_record_);
    made = recipe_->run();
  }
  const c10::Storage storage = residency_->ledger().counted(std::move(made.mutable_data_ptr()), bytes_);
  residency_->ledger().counters().recomputed.add(bytes_);
  auto fetched = std::make_shared<Fetched>(residency_->tier(), storage, Ticket{}, stream, nullptr, Gauge::Lease{});
  fetched->asked_for();
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  unwanted = comes_back(std::move(fetched));
  return storage;
}

c10::Storage SavedStorage::wait_for(const std::shared_ptr<Fetched>& fetched) {
  try {
    if (fetched->is_source()) {
      residency_->ledger().counters().reused.add(bytes_);
    }
    return fetched->get();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    std::erase(elsewhere_, fetched);  // whoever asks next tries again
    if (back_ == fetched) {
      back_ = nullptr;
      if (elsewhere_.empty()) {
        state_ = State::kAway;
      } else {
        back_ = std::move(elsewhere_.back());
        elsewhere_.pop_back();
      }
    }
    throw;
  }
}

// Room for a fetch of so many bytes more on the device.
bool SavedStorage::take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room) {
  if (!held_bytes) {
    return residency_->window().try_hold(bytes_, residency_->bounds().window(), room);
  }
  if (residency_->ledger().storages_on_device() + bytes > *held_bytes) {
    return false;
  }
  room = residency_->window().hold(bytes_);
  return true;
}

bool SavedStorage::fetch_ahead(std::optional<std::uint64_t> held_bytes) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kAway) {
    return true;
  }
  const c10::Stream stream = residency_->tier().current_stream();
  if (std::optional<c10::Storage> source = live_source()) {
    // Where steps wait for copies, what the stash still has takes no room in the window: it would fill it, and no copy
    // would start.
    const std::uint64_t more = source_lease_.expired() ? bytes_ : 0;  // if others have it, it would go without ebb
    const bool beside_window = !held_bytes && residency_->bounds().sources_beside_window();
    Gauge::Lease room;
    if (beside_window ? !residency_->retained().try_hold(bytes_, residency_->bounds().stash(), room)
                      : !take_room(more, held_bytes, room)) {
      return beside_window;  // somebody else has it: perhaps for long enough
    }
    back_ = std::make_shared<Fetched>(residency_->tier(), *std::move(source), Ticket{}, stream, device_lease(),
                                      std::move(room));
  } else if (handed_out_on(stream)) {  // the program has it, and an unpack finds it
    return true;
  } else {
    Gauge::Lease window;
    if (!take_room(bytes_, held_bytes, window)) {
      return false;
    }
    try {
      const Residency::FetchingAhead here;
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
  if (this == fetching_here()) {
    return;
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock && state_ == State::kBack && back_->is_guess()) {
    unwanted = std::exchange(back_, nullptr);
    state_ = State::kAway;
  }
}

// kBack -> kAway: every save has had the bytes in this round, so the device copy has no use until one asks again.
SavedStorage::DeviceCopies SavedStorage::let_go() noexcept {
  ++round_;
  pending_ = uses_;
  DeviceCopies unwanted{.back = nullptr, .elsewhere = std::exchange(elsewhere_, {})};
  if (state_ == State::kBack) {
    state_ = State::kAway;
    lent_ = back_->is_source() ? source_lease_.lock() : nullptr;
    unwanted.back = std::exchange(back_, nullptr);
  }
  return unwanted;
}

// Whether this was the round's first use. After the last pending one the device copy goes.
bool SavedStorage::mark_used(Use& use, const c10::Storage& storage, c10::Stream stream) {
  DeviceCopies no_longer_needed;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  remember(storage, stream);
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

// It is the source, in other memory than when it was saved.
bool SavedStorage::was_swapped(const c10::StorageImpl& storage) const {
  return &storage == source_identity_ && storage.data() != source_data_;
}

// The source, if somebody still has it. Without hooks backward, too, would read what memory it has by now; a recipe
// takes what was saved.
std::optional<c10::Storage> SavedStorage::live_source() const {
  c10::intrusive_ptr<c10::StorageImpl> source = source_.lock();
  if (!source || source->nbytes() != bytes_ || (Recipe::runs_here() && was_swapped(*source))) {
    return std::nullopt;
  }
  return c10::Storage(std::move(source));
}

std::shared_ptr<Gauge::Lease> SavedStorage::device_lease() {
  std::shared_ptr<Gauge::Lease> lease = source_lease_.lock();
  return lease != nullptr ? lease : std::make_shared<Gauge::Lease>(residency_->ledger().on_device().hold(bytes_));
}

std::shared_ptr<Fetched> SavedStorage::fetch(c10::Stream stream, Gauge::Lease window) {
  Tier& tier = residency_->tier();
  fetching_here() = this;
  const auto over = c10::make_scope_exit([] { fetching_here() = nullptr; });
  c10::DataPtr data = tier.allocate(bytes_);
  void* const memory = data.get();
  // All that may fail comes before the copy starts.
  c10::Storage storage = residency_->ledger().counted(std::move(data), bytes_);
  auto fetched = std::make_shared<Fetched>(tier, std::move(storage), Ticket{}, stream, nullptr, std::move(window));
  // The memory may have been freed by the host while the stream still uses it (R5), and the block may still be being
  // written (R2).
  After after(WaitPoint::kInAfterMemory, stream);
  after.add(WaitPoint::kInAfterOut, left_);
  Ticket arrived = tier.copy_in(memory, *block_, after);
  fetched->arrives(arrived);
  block_->gate(WaitPoint::kInGatesBlock, arrived);
  residency_->ledger().counters().fetched.add(bytes_);
  return fetched;
}

}  // namespace ebb
