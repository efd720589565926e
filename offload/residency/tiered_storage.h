#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/report/gauge.h"
#include "offload/residency/evictable.h"
#include "offload/residency/eviction_queue.h"
#include "offload/residency/fetched.h"
#include "offload/residency/prefetchable.h"
#include "streams/base/block.h"
#include "streams/base/mutex.h"
#include "streams/base/ticket.h"

namespace ebb {

class Recipe;
class Residency;

// The bytes of one storage, and where they are: on the device, in a block of the tier, or nowhere, with a recipe to
// make them again. Who uses the bytes, and how often, is the affair of a derived class; nothing here is of autograd.
//
// kResident   The source itself is held. Every storage starts here, and stays here where a policy or a full tier leave
//             it.
// kOffDevice  The bytes are in a block of the tier, or on their way there (`left_` tells), or nowhere, with a recipe.
// The
//             source is not held here, though the stash, or the program, may still have it; then it is what `find`
//             returns.
// kRestored   The bytes are on the device again, or on their way (Fetched knows). Block and recipe are kept, so that
// the
//             bytes on the device can be released and fetched again.
//
// Every edge is in the table of tiered_storage.cc (Note [Where bytes go]).
//
// Note [Asked for again]
// A backward may ask for the same save more than once (a custom function that calls get_saved_variables twice), and
// each time is entitled to the bytes. What was handed out is remembered weakly: as long as somebody holds it, that is
// what the next one gets.
//
// Threads: every public member may be called from any thread. The mutex is held while copies are started, not while one
// is waited for or a recipe runs; but a tier whose copies out run at once (HostMemory::kPageable) makes starting one
// take as long.
class TieredStorage : public Prefetchable, public Evictable, public std::enable_shared_from_this<TieredStorage> {
 public:
  TieredStorage(std::shared_ptr<Residency> residency, c10::Storage source);
  ~TieredStorage() override;
  TieredStorage(const TieredStorage&) = delete;
  TieredStorage& operator=(const TieredStorage&) = delete;

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] const std::shared_ptr<Residency>& residency() const { return residency_; }

  // Only to compare: the storage itself may be gone.
  [[nodiscard]] const c10::StorageImpl* source_identity() const { return source_identity_; }

  // Lives while ebb refers to the source: kept, or in the stash.
  [[nodiscard]] std::weak_ptr<const void> held_by_ebb() const { return source_lease_; }

  // Whether the program has resized the source, or given it other memory, while it was held here. What a recipe
  // computes from must be as it was saved.
  [[nodiscard]] bool source_has_changed();

  // Has the storage wait in the residency's eviction queue. `stream`: the one that the bytes were made on.
  void may_be_evicted(c10::Stream stream);

  // kResident -> kOffDevice. False where the storage is not resident, waits for a deferred copy, is used by others too,
  // or finds no room in the tier.
  [[nodiscard]] bool evict(c10::Stream stream) override;

  // kResident -> kOffDevice: starts the copy out, behind the work given to `stream` so far, and hands the source to the
  // stash. A derived class may do something around that.
  virtual void offload(Block block, c10::Stream stream);

  // The same in two parts: resident until the second, and for good if the copy then cannot start. See Note [Saved
  // before it is filled] in deferred_copies.h.
  void defer_offload(Block block, c10::Stream stream);
  void offload_deferred() noexcept;

  // kResident -> kOffDevice: lets go of the source, which `recipe` makes again.
  void drop(std::unique_ptr<Recipe> recipe);

  // How many recipes run one inside the other to have the bytes; 0 without.
  [[nodiscard]] int recipe_depth();

  // kOffDevice -> kRestored, if the window has room: starts the copy in before anybody asks, or keeps the source where
  // that is still there (beside the window, if StagingLimits::sources_beside_window: as many bytes as the stash may
  // have).
  bool prefetch(std::optional<std::uint64_t> held_bytes) override;

  // kRestored -> kOffDevice, of a copy that nobody has claimed.
  void cancel_prefetch() override;

 protected:
  enum class State : std::uint8_t { kResident, kOffDevice, kRestored };

  // When the bytes leave.
  enum class Leaves : bool { kAtItsSave, kLater };

  // The bytes on the device again: on the stream that asked first, and on others.
  struct DeviceCopies {
    std::shared_ptr<Fetched> restored;
    std::vector<std::shared_ptr<Fetched>> on_other_streams;
  };

  // The bytes of a storage that is not resident, on the device and ready for work on `stream`. Has others make room on
  // a device that is full, and then sets `device_is_full`. Throws c10::OutOfMemoryError, what a copy failed with, or
  // what Recipe::run throws; it may then be called again.
  [[nodiscard]] c10::Storage find(c10::Stream stream, bool& device_is_full);

  // Runs the recipe. A derived class may do something around that.
  [[nodiscard]] virtual c10::Storage run(Recipe& recipe);

  // The members with this suffix need the mutex.
  [[nodiscard]] c10::Storage get_for_capture_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::optional<c10::Storage> handed_out_on_locked(c10::Stream stream) const EBB_REQUIRES(mutex_);
  void remember_locked(const c10::Storage& storage, c10::Stream stream) EBB_REQUIRES(mutex_);

  // kRestored -> kOffDevice. The result is to be destroyed after the mutex is released.
  [[nodiscard]] DeviceCopies release_locked() noexcept EBB_REQUIRES(mutex_);

  // Called with the mutex held, before the copy out is started; what it throws stops it. From its return on nothing may
  // fail that the derived class does for it.
  virtual void leaves_locked(c10::Stream /*stream*/, Leaves /*when*/) EBB_REQUIRES(mutex_) {}

  // What the stash may hold once this storage's source is in it.
  [[nodiscard]] virtual std::uint64_t stash_limit_bytes() const;

  [[nodiscard]] bool is_resident_locked() const EBB_REQUIRES(mutex_) { return state_ == State::kResident; }
  [[nodiscard]] bool is_off_device_locked() const EBB_REQUIRES(mutex_) { return state_ == State::kOffDevice; }
  [[nodiscard]] const c10::Storage& resident_locked() const EBB_REQUIRES(mutex_) { return resident_; }
  [[nodiscard]] bool has_recipe() const { return recipe_ != nullptr; }  // fixed once the storage has left

  Mutex mutex_;

 private:
  struct DeferredCopy {
    Block block;
    c10::Stream stream;
  };

  // What the stash holds until the copy out is done.
  struct Leaving {
    c10::Storage source;
    std::shared_ptr<Gauge::Lease> on_device;
    Ticket left;
  };

  // What was handed out, on which stream. Weak: the program decides how long it lives.
  struct HandedOut {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    c10::Stream stream;
  };

  static const TieredStorage*& fetching_here();
  void move_to_locked(State next) EBB_REQUIRES(mutex_);
  [[nodiscard]] Leaving start_out_locked(Block block, c10::Stream stream, Leaves when) EBB_REQUIRES(mutex_);
  void into_stash(Leaving leaving, c10::Stream stream, std::uint64_t limit_bytes);
  [[nodiscard]] bool source_is_as_saved_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] c10::Storage try_find(c10::Stream stream);
  [[nodiscard]] c10::Storage recompute(c10::Stream stream);
  [[nodiscard]] bool take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room);
  [[nodiscard]] std::optional<c10::Storage> live_source_locked() const EBB_REQUIRES(mutex_);
  [[nodiscard]] bool was_swapped(const c10::StorageImpl& storage) const;
  [[nodiscard]] std::shared_ptr<Fetched> restored_on_locked(c10::Stream stream) const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Fetched> restore_locked(std::shared_ptr<Fetched> fetched) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Fetched> fetch_locked(c10::Stream stream, Gauge::Lease window) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::shared_ptr<Gauge::Lease> device_lease_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] c10::Storage wait_for(const std::shared_ptr<Fetched>& fetched);

  const std::shared_ptr<Residency> residency_;
  const std::size_t bytes_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const c10::StorageImpl* const source_identity_;
  const void* const source_data_;

  Mutex recompute_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held while the recipe runs

  State state_ EBB_GUARDED_BY(mutex_) = State::kResident;
  c10::Storage resident_ EBB_GUARDED_BY(mutex_);                    // kResident
  std::shared_ptr<Gauge::Lease> on_device_ EBB_GUARDED_BY(mutex_);  // kResident
  std::optional<DeferredCopy> deferred_ EBB_GUARDED_BY(mutex_);     // kResident
  std::weak_ptr<Gauge::Lease>
      source_lease_;  // of the source's bytes, which count once, whoever holds the source. Fixed
  // Of a source that was handed out, whose node holds it after all of us.
  std::shared_ptr<Gauge::Lease> lent_ EBB_GUARDED_BY(mutex_);
  std::optional<EvictionQueue::Id> evictable_ EBB_GUARDED_BY(mutex_);  // once may_be_evicted
  // Off the device or restored there is a block or a recipe. The recipe is fixed once the storage has left.
  std::optional<Block> block_ EBB_GUARDED_BY(mutex_);
  std::unique_ptr<Recipe> recipe_;
  Ticket left_ EBB_GUARDED_BY(mutex_);                        // the copy out
  std::shared_ptr<Fetched> restored_ EBB_GUARDED_BY(mutex_);  // kRestored
  // kRestored: on other streams than restored_'s.
  std::vector<std::shared_ptr<Fetched>> on_other_streams_ EBB_GUARDED_BY(mutex_);
  std::vector<HandedOut> handed_out_ EBB_GUARDED_BY(mutex_);  // at most one for each stream. Note [Asked for again]
};

}  // namespace ebb
