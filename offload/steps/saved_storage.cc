#include "offload/steps/saved_storage.h"

#include <exception>
#include <mutex>
#include <utility>

#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/base/references.h"
#include "offload/recording/step_recorder.h"
#include "offload/steps/steps.h"

namespace ebb {

SavedStorage::Use::Use(std::shared_ptr<SavedStorage> storage) : storage_(std::move(storage)) {
  const MutexLock lock(storage_->mutex_);
  ++storage_->round_.uses;
  ++storage_->round_.pending;
}

SavedStorage::Use::~Use() {
  if (storage_->residency_->forked()) {  // in a child the lock may be held forever
    return;
  }
  SavedBytes::Copies no_longer_needed;  // destroyed after the lock is released
  const MutexLock lock(storage_->mutex_);
  --storage_->round_.uses;
  if (seen_ != storage_->round_.number) {
    --storage_->round_.pending;
  }
  if (storage_->round_.pending == 0) {
    no_longer_needed = storage_->end_round_locked();
  }
}

c10::Storage SavedStorage::Use::get() {
  SavedStorage& saved = *storage_;
  saved.residency_->check_process();
  const HostRange range(saved.residency_->trace(), "unpack", saved.bytes());
  std::shared_ptr<StepRecorder> recorder;
  {
    const MutexLock lock(saved.mutex_);
    recorder = saved.in_step_.recorder;
  }
  if (recorder != nullptr && !Recipe::runs_here()) {
    recorder->needed(saved.in_step_.index_in_record);
  }
  const StepRecorder::ClockPause pause(recorder.get());
  c10::Storage bytes = saved.get_on(saved.residency_->tier().current_stream(), *this);
  if (const auto at_first_use = saved.take_at_first_use()) {
    const StepRecorder::ClockPause run(recorder.get(), saved.in_step_.index_in_record);
    at_first_use(bytes);
  }
  return bytes;
}

SavedStorage::SavedStorage(std::shared_ptr<Residency> residency, Steps& steps, std::shared_ptr<SavedStep> step,
                           c10::Storage source, c10::VariableVersion version, bool is_of_region)
    : residency_(std::move(residency)),
      steps_(steps),
      step_(std::move(step)),
      version_(std::move(version)),
      is_of_region_(is_of_region),
      source_(source),
      if_kept_(residency_->ledger().if_kept().hold(bytes())),
      bytes_(*residency_, source_, std::move(source)) {
  step_->began();
}

SavedStorage::~SavedStorage() {
  steps_.table().erase(source_.identity(), this);
  if (deferred_) {
    residency_->ledger().count_kept(KeptReason::kDeferred, bytes());
  }
  if (evictable_) {
    steps_.eviction_queue().remove_kept(*evictable_);
  }
  residency_->stash().sweep();
  if (in_step_.recorder != nullptr) {
    in_step_.recorder->released(in_step_.index_in_record);
  }
  step_->ended(in_step_.id ? std::optional(SavedStep::Gone{*in_step_.id, bytes()}) : std::nullopt);
}

std::weak_ptr<const void> SavedStorage::held_by_ebb() {
  const MutexLock lock(mutex_);
  return bytes_.held_by_ebb();
}

bool SavedStorage::source_has_changed() {
  const MutexLock lock(mutex_);
  return bytes_.source_has_changed();
}

int SavedStorage::recipe_depth() {
  const MutexLock lock(mutex_);
  return bytes_.recipe() == nullptr ? 0 : bytes_.recipe()->depth();
}

void SavedStorage::enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder,
                              std::uint32_t index_in_record) {
  const MutexLock lock(mutex_);
  in_step_.ordinal = ordinal;
  in_step_.recorder = std::move(recorder);
  in_step_.index_in_record = index_in_record;
}

std::optional<std::uint32_t> SavedStorage::index_in(const StepRecorder& recorder) const {
  return in_step_.recorder.get() == &recorder ? std::optional(in_step_.index_in_record) : std::nullopt;
}

void SavedStorage::stays() {
  if (in_step_.recorder != nullptr) {
    in_step_.recorder->kept(in_step_.index_in_record);
  }
  Gauge::Lease lease = residency_->ledger().on_device().hold(bytes());
  const MutexLock lock(mutex_);
  bytes_.count_source(lease);
}

void SavedStorage::may_be_evicted(c10::Stream stream) {
  const MutexLock lock(mutex_);
  evictable_ = steps_.eviction_queue().add_kept(weak_from_this(), stream);
}

bool SavedStorage::evict(c10::Stream stream) {
  std::optional<SavedBytes::Leaving> leaving;
  {
    if (!mutex_.try_lock()) {
      return false;
    }
    const MutexLock lock(mutex_, std::adopt_lock);
    if (deferred_ || !bytes_.is_as_saved() || !bytes_.is_the_last_to_hold_source()) {
      return false;
    }
    std::optional<Block> block = residency_->tier().try_acquire(bytes());
    if (!block) {
      return false;
    }
    leaving.emplace(leave_locked(*std::move(block), stream, SavedStep::Went::kLater));
    if (evictable_) {
      steps_.eviction_queue().remove_kept(*std::exchange(evictable_, std::nullopt));
    }
  }
  residency_->ledger().count_evicted(bytes());
  residency_->stash().hold(std::move(leaving->place), std::move(leaving->departure), /*limit_bytes=*/0);
  return true;
}

void SavedStorage::offload(Block block, c10::Stream stream) {
  const StepRecorder::ClockPause pause(in_step_.recorder.get());
  std::optional<SavedBytes::Leaving> leaving;
  {
    const MutexLock lock(mutex_);
    leaving.emplace(leave_locked(std::move(block), stream, SavedStep::Went::kAtItsSave));
  }
  residency_->ledger().count_offloaded(bytes());
  const std::uint64_t limit_bytes = steps_.stash_limit_after(*step_, in_step_.ordinal);
  residency_->stash().make_room(bytes(), limit_bytes);
  if (Gauge::Lease& on_device = *leaving->departure.on_device; !on_device) {  // no deferred copy
    on_device = residency_->ledger().on_device().hold(bytes());
  }
  residency_->stash().hold(std::move(leaving->place), std::move(leaving->departure), limit_bytes);
}

SavedBytes::Leaving SavedStorage::leave_locked(Block block, c10::Stream stream, SavedStep::Went when) {
  if (!in_step_.id) {
    in_step_.id = step_->append(weak_from_this(), bytes(), stream, in_step_.ordinal, when);
  }
  return bytes_.leave(std::move(block), stream);
}

void SavedStorage::defer_offload(Block block, c10::Stream stream) {
  const MutexLock lock(mutex_);
  deferred_.emplace(DeferredCopy{std::move(block), stream});
}

void SavedStorage::offload_deferred() noexcept {
  if (residency_->forked()) {
    return;
  }
  bool captures = true;  // if the tier cannot tell, the storage stays
  try {
    captures = residency_->tier().captures();
  } catch (...) {
  }
  std::optional<DeferredCopy> copy;
  bool as_saved = false;  // if the source has changed, it stays, and the saves get its present bytes
  {
    const MutexLock lock(mutex_);
    copy = std::exchange(deferred_, std::nullopt);
    as_saved = bytes_.is_as_saved();
  }
  if (copy && as_saved && !captures) {
    try {
      offload(std::move(copy->block), copy->stream);
      return;
    } catch (...) {
      log_warning("a copy out could not be started; the saved tensor stays on the device");
    }
  }
  residency_->ledger().count_kept(KeptReason::kDeferred, bytes());
}

void SavedStorage::at_first_use(std::function<void(const c10::Storage&)> what, bool by_recipes) {
  const MutexLock lock(mutex_);
  at_first_use_ = std::move(what);
  first_use_is_by_recipes_ = by_recipes;
}

std::function<void(const c10::Storage&)> SavedStorage::take_at_first_use() {
  const bool captures = residency_->tier().captures();
  const MutexLock lock(mutex_);
  const bool is_now = !captures && (!Recipe::runs_here() || first_use_is_by_recipes_);
  return is_now ? std::exchange(at_first_use_, nullptr) : nullptr;
}

void SavedStorage::drop(std::unique_ptr<Recipe> recipe) {
  std::optional<SavedBytes::Dropped> dropped;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  dropped.emplace(bytes_.drop(std::move(recipe)));
}

void SavedStorage::part_from_source(const std::function<c10::Storage(const c10::Storage&)>& copy_of) {
  c10::Storage resident;  // destroyed, as the others are, after the lock is released
  {
    const MutexLock lock(mutex_);
    resident = bytes_.is_resident() ? bytes_.resident() : c10::Storage();
  }
  c10::Storage copy = resident && !source_.has_parted() ? copy_of(resident) : c10::Storage();
  SavedBytes::Parted parted;
  {
    const MutexLock lock(mutex_);
    if (source_.has_parted()) {
      return;
    }
    source_.part();
    parted = bytes_.part(std::move(copy));
    if (evictable_) {
      steps_.eviction_queue().remove_kept(*std::exchange(evictable_, std::nullopt));
    }
  }
  Tier& tier = residency_->tier();
  tier.wait(WaitPoint::kWriteAfterOut, tier.current_stream(), parted.copied_out);
}

bool SavedStorage::is_held_by_program() {
  const c10::Storage source = source_.lock();  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  return source && references_to(source) > 1 + bytes_.references_of_ebb();
}

c10::Storage SavedStorage::get_on(c10::Stream stream, Use& use) {
  const int pass = backward_here();
  const bool captures = residency_->tier().captures();
  const c10::Storage source = captures ? source_.lock() : c10::Storage();
  c10::Storage storage;
  std::uint32_t ordinal = SavedStep::kNotPlanned;
  bool again = false;
  {
    const MutexLock lock(mutex_);
    if (captures) {
      return bytes_.for_capture(source);
    }
    again = use.seen_by_ == pass && use.seen_ != 0 && use.seen_ + 1 >= round_.number;
    if (bytes_.is_resident()) {
      use.seen_by_ = pass;
      storage = bytes_.resident();
    } else if (again && bytes_.is_off_device()) {
      if (c10::Storage known = bytes_.handed_out_on(stream)) {
        residency_->ledger().counters().reused.add(bytes());
        return known;
      }
    }
    ordinal = in_step_.ordinal;
  }
  const bool resident = storage;
  if (resident) {
    step_->begin_use();
  } else {
    storage = find(stream);
    const Marked marked = mark_used(use, pass, storage, stream);
    if (marked.is_made_again) {
      step_->begin_use();
    } else if (marked.is_first && !again) {
      step_->used(*in_step_.id);
    }
  }
  // Inside a recipe backward has asked for the recipe's result, and not for this storage.
  const bool planned = !Recipe::runs_here() && step_->asked(ordinal);
  if (resident && !planned) {  // Note [Before the first use] in stall_monitor.h
    return storage;
  }
  if (step_->prefetch(&start_prefetch)) {
    residency_->tier().flush();  // no further copy will join the batch
  }
  residency_->stash().sweep();
  return storage;
}

// The bytes of a storage that is not resident.
c10::Storage SavedStorage::find(c10::Stream stream) {
  const c10::Storage source = source_.lock();  // not under the lock: Note [The interpreter's lock]
  c10::Storage memory;
  while (true) {
    std::shared_ptr<Fetched> fetched;
    std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
    bool is_made_again = false;
    {
      const MutexLock lock(mutex_);
      fetched = bytes_.restored_on(stream);
      if (fetched == nullptr) {
        c10::Storage there = bytes_.handed_out_on(stream);
        if (!there && source) {
          there = source;
          bytes_.lend_source();
        }
        if (there) {
          residency_->ledger().counters().reused.add(bytes());
          return there;
        }
        is_made_again = bytes_.recipe() != nullptr;
        if (!is_made_again && memory) {
          fetched = bytes_.fetch(std::move(memory), stream, {});
          unwanted = bytes_.restore(fetched);
        }
      }
      if (fetched != nullptr) {
        fetched->claim();
      }
    }
    if (fetched != nullptr) {
      return wait_for(fetched);
    }
    if (is_made_again) {
      return recompute(stream);
    }
    memory = take_memory();
  }
}

c10::Storage SavedStorage::take_memory() {
  return residency_->ledger().counted(residency_->tier().allocate(bytes()), bytes(),
                                      DeviceAccount::Held::What::kAsSaved);
}

// The lock is not held: on the CPU the wait may take as long as the disk does.
c10::Storage SavedStorage::wait_for(const std::shared_ptr<Fetched>& fetched) {
  try {
    if (fetched->is_source()) {
      residency_->ledger().counters().reused.add(bytes());
    }
    return fetched->get();
  } catch (...) {  // the next get() tries again
    const MutexLock lock(mutex_);
    bytes_.forget(fetched);
    throw;
  }
}

c10::Storage SavedStorage::recompute(c10::Stream stream) {
  const MutexLock one_at_a_time(recompute_mutex_);
  Recipe* recipe = nullptr;
  {
    const MutexLock lock(mutex_);
    if (const std::shared_ptr<Fetched> restored = bytes_.restored_on(stream)) {  // by another thread, meanwhile
      return restored->get();
    }
    recipe = bytes_.recipe();
  }
  if (recipe->run_of_several() != 0 && step_->prefetch(&start_prefetch)) {  // the run takes long
    residency_->tier().flush();
  }
  const HostRange range(residency_->trace(), "recompute", bytes());
  c10::Storage made = [&] {
    // The pause names the storage, so that the record takes the pause's length as the recipe's time.
    const StepRecorder::ClockPause pause(in_step_.recorder.get(), in_step_.index_in_record);
    return recipe->run();
  }();
  const c10::Storage storage =
      residency_->ledger().counted(std::move(made.mutable_data_ptr()), bytes(), DeviceAccount::Held::What::kRecomputed);
  residency_->ledger().counters().recomputed.add(bytes());
  auto fetched = std::make_shared<Fetched>(residency_->tier(), storage, stream, nullptr, Gauge::Lease());
  fetched->claim();
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  unwanted = bytes_.restore(std::move(fetched));
  return storage;
}

// Notes the use, and releases the copy on the device after the last pending use.
SavedStorage::Marked SavedStorage::mark_used(Use& use, int pass, const c10::Storage& storage, c10::Stream stream) {
  SavedBytes::Copies no_longer_needed;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  bytes_.remember(storage, stream);
  const bool is_first = std::exchange(round_.told, round_.number) != round_.number;
  use.seen_by_ = pass;
  if (use.seen_ != round_.number) {
    use.seen_ = round_.number;
    --round_.pending;
  }
  if (round_.pending == 0 || !in_force(WaitPoint::kPendingUses)) {
    no_longer_needed = end_round_locked();
  }
  return {is_first, bytes_.recipe() != nullptr};
}

// Every save has got the bytes in this round, so the copy on the device has no use until a save asks again.
SavedBytes::Copies SavedStorage::end_round_locked() noexcept {
  ++round_.number;
  round_.pending = round_.uses;
  return bytes_.release();
}

// Takes room in the window for a prefetch that adds `more` bytes to what ebb holds on the device. With a plan
// `held_bytes` is the bound, which has room for what recipes make; otherwise the window's limit is. Returns false, and
// takes nothing, over the bound.
bool SavedStorage::take_room(std::uint64_t more, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room) {
  if (!held_bytes) {
    return residency_->window().try_hold(bytes(), steps_.window_limit(), room);
  }
  if (residency_->ledger().on_device_as_saved() + more > *held_bytes) {
    return false;
  }
  room = residency_->window().hold(bytes());
  return true;
}

bool SavedStorage::start_prefetch(SavedStorage& storage, std::optional<std::uint64_t> held_bytes) {
  return storage.prefetch(held_bytes);
}

bool SavedStorage::prefetch(std::optional<std::uint64_t> held_bytes) {
  const c10::Stream stream = residency_->tier().current_stream();
  c10::Storage source = source_.lock();  // destroyed after the lock is released
  Gauge::Lease room;
  {
    const MutexLock lock(mutex_);
    if (!bytes_.is_off_device()) {
      return true;
    }
    if (source) {
      // Where steps wait for copies, sources that the stash still has take no room in the window: they would fill it,
      // and no copy would start. A source that only the program holds is not counted yet.
      const std::uint64_t more = bytes_.held_by_ebb().expired() ? bytes() : 0;
      const bool beside_window = !held_bytes && steps_.sources_beside_window();
      if (beside_window ? !residency_->retained().try_hold(bytes(), steps_.stash_limit(), room)
                        : !take_room(more, held_bytes, room)) {
        return beside_window;  // a source not held here may still be alive at its unpack
      }
      prefetched_locked(bytes_.held(std::move(source), stream, std::move(room)));
      return true;
    }
    if (bytes_.handed_out_on(stream)) {  // the program holds the bytes, and an unpack finds them there
      return true;
    }
  }
  if (!take_room(bytes(), held_bytes, room)) {
    return false;
  }
  try {
    const Prefetching here;
    c10::Storage memory = take_memory();  // destroyed after the lock is released
    const MutexLock lock(mutex_);
    if (bytes_.is_off_device()) {
      prefetched_locked(bytes_.fetch(std::move(memory), stream, std::move(room)));
    }
    return true;
  } catch (const std::exception&) {  // backward fetches the bytes when it needs them
    return false;
  }
}

void SavedStorage::prefetched_locked(const std::shared_ptr<Fetched>& fetched) {
  steps_.eviction_queue().add_copy(step_, weak_from_this(), fetched);
  static_cast<void>(bytes_.restore(fetched));
}

void SavedStorage::cancel_prefetch() {
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  if (mutex_.try_lock()) {
    const MutexLock lock(mutex_, std::adopt_lock);
    unwanted = bytes_.cancel();
  }
}

}  // namespace ebb
