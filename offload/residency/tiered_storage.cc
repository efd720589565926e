#include "offload/residency/tiered_storage.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include "offload/base/log.h"
#include "offload/base/references.h"
#include "offload/residency/recipe.h"
#include "offload/residency/residency.h"

namespace ebb {
namespace {

// The storage that the calling thread has locked while it asks for device memory.
thread_local const TieredStorage* fetching_here = nullptr;

}  // namespace

// Note [Where bytes go]
// from        to          by
// kResident   kOffDevice  offload, evict: a copy out has been started; drop: there is a recipe
// kOffDevice  kRestored   find: a copy in has been started, or the recipe has run;
//                         prefetch: a copy in has been started, or the source was still alive and is held
// kRestored   kOffDevice  release_locked: no use is pending; cancel_prefetch: the copy was unclaimed;
//                         wait_for: the copy in has failed
void TieredStorage::move_to_locked(State next) {
  const bool legal = state_ == State::kOffDevice ? next == State::kRestored : next == State::kOffDevice;
  TORCH_INTERNAL_ASSERT(legal, "ebb: a storage cannot go from state ", static_cast<int>(state_), " to ",
                        static_cast<int>(next));
  state_ = next;
}

TieredStorage::TieredStorage(std::shared_ptr<Residency> residency, c10::Storage source)
    : residency_(std::move(residency)),
      bytes_(source.nbytes()),
      source_(source.getWeakStorageImpl()),
      source_data_(source.data()),
      resident_(std::move(source)),
      on_device_(std::make_shared<Gauge::Lease>()),
      source_lease_(on_device_) {}

TieredStorage::~TieredStorage() {
  if (deferred_) {
    residency_->ledger().count_kept(KeptReason::kDeferred, bytes_);
  }
  if (evictable_) {
    residency_->eviction_queue().remove(*evictable_);
  }
}

void TieredStorage::count_source() {
  Gauge::Lease lease = residency_->ledger().on_device().hold(bytes_);
  const MutexLock lock(mutex_);
  if (on_device_ != nullptr && !*on_device_) {
    std::swap(*on_device_, lease);
  }
}

bool TieredStorage::source_is_as_saved_locked() const {
  return resident_.nbytes() == bytes_ && resident_.data() == source_data_;
}

bool TieredStorage::source_has_changed() {
  const MutexLock lock(mutex_);
  if (state_ == State::kResident) {
    return !source_is_as_saved_locked();
  }
  return state_ == State::kRestored && restored_->is_source() &&
         was_swapped(*restored_->storage().unsafeGetStorageImpl());
}

void TieredStorage::may_be_evicted(c10::Stream stream) {
  const MutexLock lock(mutex_);
  evictable_ = residency_->eviction_queue().add(weak_from_this(), stream);
}

bool TieredStorage::evict(c10::Stream stream) {
  std::optional<Leaving> leaving;
  {
    if (this == fetching_here || !mutex_.try_lock()) {
      return false;
    }
    const MutexLock lock(mutex_, std::adopt_lock);
    if (state_ != State::kResident || deferred_ || references_to(resident_) != 1 ||
        !may_refer_to(*resident_.unsafeGetStorageImpl()) || !source_is_as_saved_locked()) {
      return false;
    }
    std::optional<Block> block = residency_->tier().try_acquire(bytes_);
    if (!block) {
      return false;
    }
    leaving.emplace(start_out_locked(*std::move(block), stream, Leaves::kLater));
    if (evictable_) {
      residency_->eviction_queue().remove(*std::exchange(evictable_, std::nullopt));
    }
  }
  residency_->ledger().count_evicted(bytes_);
  residency_->stash().hold(std::move(leaving->place), std::move(leaving->departure), /*limit_bytes=*/0);
  return true;
}

void TieredStorage::offload(Block block, c10::Stream stream) {
  std::optional<Leaving> leaving;
  {
    const MutexLock lock(mutex_);
    leaving.emplace(start_out_locked(std::move(block), stream, Leaves::kAtItsSave));
  }
  residency_->ledger().count_offloaded(bytes_);
  const std::uint64_t limit_bytes = stash_limit_bytes();
  residency_->stash().make_room(bytes_, limit_bytes);
  if (Gauge::Lease& on_device = *leaving->departure.on_device; !on_device) {  // no deferred copy
    on_device = residency_->ledger().on_device().hold(bytes_);
  }
  residency_->stash().hold(std::move(leaving->place), std::move(leaving->departure), limit_bytes);
}

TieredStorage::Leaving TieredStorage::start_out_locked(Block block, c10::Stream stream, Leaves when) {
  TORCH_INTERNAL_ASSERT(state_ == State::kResident);
  HomeBlock home(residency_->tier(), std::move(block));
  Departures::Place place = Departures::prepare(stream);
  leaves_locked(stream, when);  // before the copy starts: from then on nothing may fail
  home.copy_out(source_data_, stream);
  home_.emplace(std::move(home));
  move_to_locked(State::kOffDevice);
  return {std::move(place),
          {std::exchange(on_device_, nullptr), std::exchange(resident_, {}), home_->copied_out(), stream}};
}

void TieredStorage::defer_offload(Block block, c10::Stream stream) {
  const MutexLock lock(mutex_);
  deferred_.emplace(DeferredCopy{std::move(block), stream});
}

void TieredStorage::offload_deferred() noexcept {
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
    as_saved = source_is_as_saved_locked();
  }
  if (copy && as_saved && !captures) {
    try {
      offload(std::move(copy->block), copy->stream);
      return;
    } catch (...) {
      log_warning("a copy out could not be started; the saved tensor stays on the device");
    }
  }
  residency_->ledger().count_kept(KeptReason::kDeferred, bytes_);
}

void TieredStorage::drop(std::unique_ptr<Recipe> recipe) {
  std::shared_ptr<Gauge::Lease>
      on_device;  // destroyed after `source`, which it counts; both are destroyed after the lock is released
  c10::Storage source;
  const MutexLock lock(mutex_);
  TORCH_INTERNAL_ASSERT(state_ == State::kResident);
  recipe_ = std::move(recipe);
  move_to_locked(State::kOffDevice);
  source = std::exchange(resident_, {});
  on_device = std::exchange(on_device_, nullptr);
}

int TieredStorage::recipe_depth() {
  const MutexLock lock(mutex_);
  return recipe_ == nullptr ? 0 : recipe_->depth();
}

// The bytes, if they have not left the device; throws c10::Error otherwise. See Note [CUDA graphs] in packed.h.
c10::Storage TieredStorage::get_for_capture_locked() const {
  std::optional<c10::Storage> there = state_ == State::kResident ? std::optional(resident_) : live_source();
  TORCH_CHECK(there,
              "ebb: backward is captured in a CUDA graph and asks for a tensor that was saved, and moved, before the "
              "capture began. Capture forward and backward together, or put a NoOpGuard around that forward pass.");
  return *std::move(there);
}

c10::Storage TieredStorage::find(c10::Stream stream, bool& device_is_full) {
  while (true) {
    try {
      return try_find(stream);
    } catch (const c10::OutOfMemoryError&) {
      // Inside a recipe the outermost find() tries again; otherwise each recipe inside another would double the tries.
      if (Recipe::runs_here() || (residency_->evict(bytes_) == 0 && device_is_full)) {
        throw;
      }
      device_is_full = true;
    }
  }
}

c10::Storage TieredStorage::try_find(c10::Stream stream) {
  std::shared_ptr<Fetched> fetched;
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  std::optional<c10::Storage> source = live_source();
  c10::Storage storage;
  {
    const MutexLock lock(mutex_);
    fetched = restored_on_locked(stream);
    if (fetched == nullptr) {
      if (std::optional<c10::Storage> known = handed_out_on_locked(stream)) {
        storage = *std::move(known);
      } else if (source) {
        storage = *std::move(source);
        lent_ = source_lease_.lock();
        count_if_still_held_locked();
      }
      if (storage) {
        residency_->ledger().counters().reused.add(bytes_);
      } else if (recipe_ == nullptr) {
        fetched = fetch_locked(stream, {});
        unwanted = restore_locked(fetched);
      }
    }
    if (fetched != nullptr) {
      fetched->claim();
    }
  }
  // The lock is released by now: on the CPU the wait may take as long as the disk does.
  if (fetched != nullptr) {
    return wait_for(fetched);
  }
  return storage ? storage : recompute(stream);
}

// The restored bytes that work on `stream` may use: those in the memory of `stream` only, because nothing orders
// another stream's work with the work on `stream` (R4, R5 in docs/design.md). Null for none.
std::shared_ptr<Fetched> TieredStorage::restored_on_locked(c10::Stream stream) const {
  if (state_ != State::kRestored) {
    return nullptr;
  }
  if (restored_->stream() == stream || !in_force(WaitPoint::kOwnStream)) {
    return restored_;
  }
  const auto found = std::ranges::find(on_other_streams_, stream, &Fetched::stream);
  return found == on_other_streams_.end() ? nullptr : *found;
}

// Makes `fetched` the restored copy. An unclaimed prefetch for another stream is replaced and returned, for the caller
// to destroy; a claimed copy on another stream stays for the pending uses there, and `fetched` is kept beside it.
std::shared_ptr<Fetched> TieredStorage::restore_locked(std::shared_ptr<Fetched> fetched) {
  if (state_ == State::kRestored && !restored_->is_unclaimed()) {
    on_other_streams_.push_back(std::move(fetched));
    return nullptr;
  }
  if (state_ == State::kOffDevice) {
    move_to_locked(State::kRestored);
  }
  return std::exchange(restored_, std::move(fetched));
}

// The storage that was handed out on `stream`, if somebody still holds it: see Note [Asked for again].
std::optional<c10::Storage> TieredStorage::handed_out_on_locked(c10::Stream stream) const {
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

void TieredStorage::remember_locked(const c10::Storage& storage, c10::Stream stream) {
  const auto known = std::ranges::find(handed_out_, stream, &HandedOut::stream);
  HandedOut& entry = known != handed_out_.end()
                         ? *known
                         : handed_out_.emplace_back(HandedOut{storage.getWeakStorageImpl(), nullptr, stream});
  if (entry.data != storage.data() || entry.storage.expired()) {
    entry.storage = storage.getWeakStorageImpl();
    entry.data = storage.data();
  }
}

c10::Storage TieredStorage::run(Recipe& recipe) { return recipe.run(); }

c10::Storage TieredStorage::recompute(c10::Stream stream) {
  const MutexLock one_at_a_time(recompute_mutex_);
  {
    const MutexLock lock(mutex_);
    if (const std::shared_ptr<Fetched> restored =
            restored_on_locked(stream)) {  // another thread has restored the bytes meanwhile
      return restored->get();
    }
  }
  const HostRange range(residency_->trace(), "recompute", bytes_);
  c10::Storage made = run(*recipe_);
  const c10::Storage storage =
      residency_->ledger().counted(std::move(made.mutable_data_ptr()), bytes_, DeviceAccount::Held::What::kRecomputed);
  residency_->ledger().counters().recomputed.add(bytes_);
  auto fetched = std::make_shared<Fetched>(residency_->tier(), storage, stream, nullptr, Gauge::Lease{});
  fetched->claim();
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  unwanted = restore_locked(std::move(fetched));
  return storage;
}

c10::Storage TieredStorage::wait_for(const std::shared_ptr<Fetched>& fetched) {
  try {
    if (fetched->is_source()) {
      residency_->ledger().counters().reused.add(bytes_);
    }
    return fetched->get();
  } catch (...) {
    const MutexLock lock(mutex_);
    std::erase(on_other_streams_, fetched);  // the next call of find() tries again
    if (restored_ == fetched) {
      restored_ = nullptr;
      if (on_other_streams_.empty()) {
        move_to_locked(State::kOffDevice);
      } else {
        restored_ = std::move(on_other_streams_.back());
        on_other_streams_.pop_back();
      }
    }
    throw;
  }
}

// Takes room in the window for a prefetch that adds `bytes` to what ebb holds on the device. With a plan `held_bytes`
// is the bound, which has room for what recipes make; otherwise the window's limit is. Returns false, and takes
// nothing, over the bound.
bool TieredStorage::take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room) {
  if (!held_bytes) {
    return residency_->window().try_hold(bytes_, residency_->prefetcher().window_limit(), room);
  }
  if (residency_->ledger().on_device_as_saved() + bytes > *held_bytes) {
    return false;
  }
  room = residency_->window().hold(bytes_);
  return true;
}

bool TieredStorage::prefetch(std::optional<std::uint64_t> held_bytes) {
  std::optional<c10::Storage> source = live_source();  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  if (state_ != State::kOffDevice) {
    return true;
  }
  const c10::Stream stream = residency_->tier().current_stream();
  if (source) {
    // Where steps wait for copies, sources that the stash still has take no room in the window: they would fill it, and
    // no copy would start.
    const std::uint64_t more =
        source_lease_.expired() ? bytes_ : 0;  // a source that only the program holds is not counted yet
    const bool beside_window = !held_bytes && residency_->prefetcher().sources_beside_window();
    Gauge::Lease room;
    if (beside_window ? !residency_->retained().try_hold(bytes_, residency_->prefetcher().stash_limit(), room)
                      : !take_room(more, held_bytes, room)) {
      return beside_window;  // a source not held here may still be alive at its unpack
    }
    count_if_still_held_locked();
    restored_ = std::make_shared<Fetched>(residency_->tier(), *source, stream, device_lease_locked(), std::move(room));
  } else if (handed_out_on_locked(stream)) {  // the program holds the bytes, and an unpack finds them there
    return true;
  } else {
    Gauge::Lease window;
    if (!take_room(bytes_, held_bytes, window)) {
      return false;
    }
    try {
      const Residency::Prefetching here;
      restored_ = fetch_locked(stream, std::move(window));
    } catch (const std::exception&) {  // backward fetches the bytes when it needs them
      return false;
    }
  }
  move_to_locked(State::kRestored);
  return true;
}

void TieredStorage::cancel_prefetch() {
  std::shared_ptr<Fetched> unwanted;  // destroyed after the lock is released
  if (this == fetching_here || !mutex_.try_lock()) {
    return;
  }
  const MutexLock lock(mutex_, std::adopt_lock);
  if (state_ == State::kRestored && restored_->is_unclaimed()) {
    unwanted = std::exchange(restored_, nullptr);
    move_to_locked(State::kOffDevice);
  }
}

TieredStorage::DeviceCopies TieredStorage::release_locked() noexcept {
  DeviceCopies unwanted{.restored = nullptr, .on_other_streams = std::exchange(on_other_streams_, {})};
  if (state_ == State::kRestored) {
    move_to_locked(State::kOffDevice);
    lent_ = restored_->is_source() ? source_lease_.lock() : nullptr;
    unwanted.restored = std::exchange(restored_, nullptr);
  }
  return unwanted;
}

// Whether `storage` is the source and has other memory than when it was saved.
bool TieredStorage::was_swapped(const c10::StorageImpl& storage) const {
  return &storage == source_identity() && storage.data() != source_data_;
}

// The source, if somebody still holds it. A source with other memory than at its save is returned too, as autograd
// without hooks would read that memory; but not inside a recipe, whose inputs must be as they were saved.
std::optional<c10::Storage> TieredStorage::live_source() const {
  c10::intrusive_ptr<c10::StorageImpl> source = source_.lock();
  if (!source || source->nbytes() != bytes_ || (Recipe::runs_here() && was_swapped(*source))) {
    return std::nullopt;
  }
  return c10::Storage(std::move(source));
}

// Of a source that is alive: whether the stash has let go of it, so that the program has it.
void TieredStorage::count_if_still_held_locked() {
  if (source_lease_.expired()) {
    residency_->ledger().counters().still_held.add(bytes_);
  }
}

std::shared_ptr<Gauge::Lease> TieredStorage::device_lease_locked() {
  std::shared_ptr<Gauge::Lease> lease = source_lease_.lock();
  return lease != nullptr ? lease : std::make_shared<Gauge::Lease>(residency_->ledger().on_device().hold(bytes_));
}

std::shared_ptr<Fetched> TieredStorage::fetch_locked(c10::Stream stream, Gauge::Lease window) {
  Tier& tier = residency_->tier();
  fetching_here = this;
  const auto over = c10::make_scope_exit([] { fetching_here = nullptr; });
  c10::DataPtr data = tier.allocate(bytes_);
  void* const memory = data.get();
  // Every call that may fail comes before the copy starts.
  c10::Storage storage = residency_->ledger().counted(std::move(data), bytes_, DeviceAccount::Held::What::kAsSaved);
  auto fetched = std::make_shared<Fetched>(tier, std::move(storage), stream, nullptr, std::move(window));
  home_->copy_in(memory, stream);
  fetched->arrives(home_->copied_in());
  residency_->ledger().counters().fetched.add(bytes_);
  return fetched;
}

}  // namespace ebb
