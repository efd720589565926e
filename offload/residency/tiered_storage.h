#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "offload/cache/home_block.h"
#include "offload/residency/eviction_queue.h"
#include "offload/residency/fetched.h"
#include "streams/base/block.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

class Recipe;
class Residency;

// The bytes of one storage, and where they are: on the device, in a block of the tier, or nowhere, with a recipe to
// make them again. A derived class knows who uses the bytes, and how often; TieredStorage knows nothing of autograd.
//
// kResident   The source itself is held. Every storage starts in this state, and stays in it if the policy keeps the
//             storage or the tier is full.
// kOffDevice  The bytes are in their home, or on their way there, or nowhere, with a recipe.
//             The source is not held here. If the stash or the program still has the source, `find` returns it.
// kRestored   The bytes are on the device again, or on their way (Fetched knows). Home and recipe are kept, so that
//             the bytes on the device can be released and fetched again.
//
// Every edge is in the table of tiered_storage.cc (Note [Where bytes go]).
//
// Note [Asked for again]
// A backward may ask for the same save more than once (a custom function that calls get_saved_variables twice), and is
// entitled to the bytes each time. The storage that was handed out is remembered weakly: as long as somebody holds that
// storage, the next unpack gets it, too.
//
// Threads: every public member may be called from any thread. The mutex is held while a copy is started, and neither
// while a copy is waited for nor while a recipe runs. A tier whose copies out run at once (HostMemory::kPageable) holds
// the mutex for as long as the copy takes.
class TieredStorage : public std::enable_shared_from_this<TieredStorage> {
 public:
  TieredStorage(std::shared_ptr<Residency> residency, c10::Storage source);
  virtual ~TieredStorage();
  TieredStorage(const TieredStorage&) = delete;
  TieredStorage& operator=(const TieredStorage&) = delete;

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] const std::shared_ptr<Residency>& residency() const { return residency_; }

  // The source's address, only to compare: the source may have been destroyed.
  [[nodiscard]] const c10::StorageImpl* source_identity() const { return source_._unsafe_get_target(); }

  // Lives while ebb refers to the source: resident or in the stash, and from there restored or lent.
  [[nodiscard]] std::weak_ptr<const void> held_by_ebb() const { return source_lease_; }

  // Counts the source of a storage that stays as held on the device. offload() counts it, too, once the stash has room.
  void count_source();

  // Whether the program has resized the source, or given it other memory, while the source was held here. A recipe's
  // inputs must be as they were saved.
  [[nodiscard]] bool source_has_changed();

  // Adds the storage to the residency's eviction queue. `stream`: the stream that the bytes were made on.
  void may_be_evicted(c10::Stream stream);

  // kResident -> kOffDevice. `stream`: the stream that made the bytes; this stream is made to wait for the copy, so
  // that the memory can be let go at once. Returns false, and does nothing, where the storage is not resident, waits
  // for a deferred copy or has changed since its save. The same goes for a storage that others use, too, that is
  // locked, or that finds no room in the tier. Throws the tier's error if the copy cannot be started. Waits for no lock
  // under which device memory is asked for, because the caller may hold the device allocator's lock.
  [[nodiscard]] bool evict(c10::Stream stream);

  // kResident -> kOffDevice: starts the copy out, behind the work given to `stream` so far, and hands the source to the
  // stash. A derived class may wrap the call.
  virtual void offload(Block block, c10::Stream stream);

  // Offload the storage in two parts: defer_offload() notes the block and the stream, and offload_deferred() starts the
  // copy out. The storage is resident until the second call, and stays resident if the copy then cannot be started. See
  // Note [Saved before it is filled] in deferred_copies.h.
  void defer_offload(Block block, c10::Stream stream);
  void offload_deferred() noexcept;

  // kResident -> kOffDevice: lets go of the source, which `recipe` makes again.
  void drop(std::unique_ptr<Recipe> recipe);

  // How many recipes run one inside the other to make the bytes; 0 without a recipe.
  [[nodiscard]] int recipe_depth();

  // kOffDevice -> kRestored, if the window has room: starts the copy in before backward asks for the bytes, or holds
  // the source if it is still alive. `held_bytes`: with a plan, the most bytes that ebb may hold on the device with
  // this copy, without what recipes and second runs of regions have made; this bound then takes the place of the
  // window's. Returns false if there is no room or the copy cannot be started; backward then fetches the bytes when it
  // asks for them. With Prefetcher::sources_beside_window sources that are alive take no room in the window. Over the
  // stash's limit, which then bounds them, the call returns true and keeps nothing: the source may live until backward
  // asks.
  bool prefetch(std::optional<std::uint64_t> held_bytes);

  // kRestored -> kOffDevice, if the copy is an unclaimed prefetch, unless another thread is just about to use the copy.
  // Waits for no lock under which device memory is asked for, because the caller may hold the device allocator's lock.
  void cancel_prefetch();

 protected:
  // When the bytes leave.
  enum class Leaves : bool { kAtItsSave, kLater };

  // The restored bytes: for the stream that asked first, and for other streams.
  struct DeviceCopies {
    std::shared_ptr<Fetched> restored;
    std::vector<std::shared_ptr<Fetched>> on_other_streams;
  };

  // Returns the bytes of a storage that is not resident, on the device and ready for work on `stream`. If the device is
  // full, sets `device_is_full` and has the residency evict. Throws c10::OutOfMemoryError, the error that a copy failed
  // with, or an error of Recipe::run; the caller may then call find() again.
  [[nodiscard]] c10::Storage find(c10::Stream stream, bool& device_is_full);

  // Runs the recipe. A derived class may wrap the call.
  [[nodiscard]] virtual c10::Storage run(Recipe& recipe);

  // Members whose names end in _locked need the mutex.
  [[nodiscard]] c10::Storage get_for_capture_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::optional<c10::Storage> handed_out_on_locked(c10::Stream stream) const EBB_REQUIRES(mutex_);
  void remember_locked(const c10::Storage& storage, c10::Stream stream) EBB_REQUIRES(mutex_);

  // kRestored -> kOffDevice. The result is to be destroyed after the mutex is released.
  [[nodiscard]] DeviceCopies release_locked() noexcept EBB_REQUIRES(mutex_);

  // Called with the mutex held, before the copy out is started. If this call throws, the copy out is not started. After
  // its return the derived class may do nothing more for the copy out that may fail.
  virtual void leaves_locked(c10::Stream stream, Leaves when) EBB_REQUIRES(mutex_) = 0;

  // How many bytes the stash may hold once this storage's source is in the stash.
  [[nodiscard]] virtual std::uint64_t stash_limit_bytes() const = 0;

  [[nodiscard]] bool is_resident_locked() const EBB_REQUIRES(mutex_) { return state_ == State::kResident; }
  [[nodiscard]] bool is_off_device_locked() const EBB_REQUIRES(mutex_) { return state_ == State::kOffDevice; }
  [[nodiscard]] const c10::Storage& resident_locked() const EBB_REQUIRES(mutex_) { return resident_; }
  [[nodiscard]] bool has_recipe() const { return recipe_ != nullptr; }  // fixed once the storage has left

  Mutex mutex_;

 private:
  enum class State : std::uint8_t { kResident, kOffDevice, kRestored };

  struct DeferredCopy {
    Block block;
    c10::Stream stream;
  };

  // A source on its way into the stash, which holds the source until the copy out is done.
  struct Leaving {
    c10::Storage source;
    std::shared_ptr<Gauge::Lease> on_device;
    Ticket left;
  };

  // A storage that was handed out, and on which stream. The reference is weak: the program decides how long the storage
  // lives.
  struct HandedOut {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    c10::Stream stream;
  };

  void move_to_locked(State next) EBB_REQUIRES(mutex_);
  [[nodiscard]] Leaving start_out_locked(Block block, c10::Stream stream, Leaves when) EBB_REQUIRES(mutex_);
  void into_stash(Leaving leaving, c10::Stream stream, std::uint64_t limit_bytes);
  [[nodiscard]] bool source_is_as_saved_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] c10::Storage try_find(c10::Stream stream);
  [[nodiscard]] c10::Storage recompute(c10::Stream stream);
  [[nodiscard]] bool take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room);
  [[nodiscard]] std::optional<c10::Storage> live_source() const;
  [[nodiscard]] bool was_swapped(const c10::StorageImpl& storage) const;
  [[nodiscard]] std::shared_ptr<Fetched> restored_on_locked(c10::Stream stream) const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Fetched> restore_locked(std::shared_ptr<Fetched> fetched) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Fetched> fetch_locked(c10::Stream stream, Gauge::Lease window) EBB_REQUIRES(mutex_);
  void count_if_still_held_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Gauge::Lease> device_lease_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] c10::Storage wait_for(const std::shared_ptr<Fetched>& fetched);

  const std::shared_ptr<Residency> residency_;
  const std::size_t bytes_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const void* const source_data_;

  Mutex recompute_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held while the recipe runs

  State state_ EBB_GUARDED_BY(mutex_) = State::kResident;
  c10::Storage resident_ EBB_GUARDED_BY(mutex_);                    // kResident
  std::shared_ptr<Gauge::Lease> on_device_ EBB_GUARDED_BY(mutex_);  // kResident
  std::optional<DeferredCopy> deferred_ EBB_GUARDED_BY(mutex_);     // kResident
  // Counts the source's bytes once, whoever of ebb holds the source. Never changed.
  std::weak_ptr<Gauge::Lease> source_lease_;
  // Counts a source that was handed out and that a node still uses after ebb has let go of it.
  std::shared_ptr<Gauge::Lease> lent_ EBB_GUARDED_BY(mutex_);
  std::optional<EvictionQueue::Id> evictable_ EBB_GUARDED_BY(mutex_);  // set by may_be_evicted
  // In kOffDevice and kRestored there is a home or a recipe. The recipe never changes once the storage has left.
  std::optional<HomeBlock> home_ EBB_GUARDED_BY(mutex_);
  std::unique_ptr<Recipe> recipe_;
  std::shared_ptr<Fetched> restored_ EBB_GUARDED_BY(mutex_);  // kRestored
  // kRestored: copies for other streams than the stream of restored_.
  std::vector<std::shared_ptr<Fetched>> on_other_streams_ EBB_GUARDED_BY(mutex_);
  std::vector<HandedOut> handed_out_ EBB_GUARDED_BY(mutex_);  // at most one for each stream; Note [Asked for again]
};

}  // namespace ebb
