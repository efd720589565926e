#include "offload/residency/saved_storage.h"

#include <algorithm>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "offload/base/backward_pass.h"
#include "offload/planning/step_recorder.h"
#include "offload/residency/recipe.h"
#include "offload/residency/residency.h"
#include "offload/residency/tape.h"

// The way back; saved_storage.cc has the way out.
namespace ebb {

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
std::vector<std::shared_ptr<Fetched>> SavedStorage::let_go() {
  ++round_;
  pending_ = uses_;
  std::vector<std::shared_ptr<Fetched>> unwanted = std::exchange(elsewhere_, {});
  if (state_ == State::kBack) {
    state_ = State::kAway;
    lent_ = back_->is_source() ? source_lease_.lock() : nullptr;
    unwanted.push_back(std::exchange(back_, nullptr));
  }
  return unwanted;
}

// Whether this was the round's first use. After the last pending one the device copy goes.
bool SavedStorage::mark_used(Use& use, const c10::Storage& storage, c10::Stream stream) {
  std::vector<std::shared_ptr<Fetched>> no_longer_needed;  // destroyed after the lock is released
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
  // The memory may have been freed by the host while the stream still uses it (R5), and the block may still be being
  // written (R2).
  After after(WaitPoint::kInAfterMemory, stream);
  after.add(WaitPoint::kInAfterOut, left_);
  Ticket arrived = tier.copy_in(data.get(), *block_, after);
  block_->gate(WaitPoint::kInGatesBlock, arrived);
  residency_->ledger().counters().fetched.add(bytes_);
  c10::Storage storage = residency_->ledger().counted(std::move(data), bytes_);
  return std::make_shared<Fetched>(tier, std::move(storage), std::move(arrived), stream, nullptr, std::move(window));
}

}  // namespace ebb
