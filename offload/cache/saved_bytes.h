#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/gauge.h"
#include "offload/cache/fetched.h"
#include "offload/cache/home_block.h"
#include "offload/cache/recipe.h"
#include "offload/cache/residency.h"
#include "offload/cache/stash.h"
#include "streams/base/block_pool.h"
#include "streams/base/ticket.h"

namespace ebb {

// The storage that was saved. The reference is weak: once the bytes have left, the stash and the program decide how
// long the storage lives.
//
// Threads: every member may be called from any thread.
class Source {
 public:
  explicit Source(const c10::Storage& storage)
      : bytes_(storage.nbytes()), storage_(storage.getWeakStorageImpl()), data_(storage.data()) {}

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] const void* data() const { return data_; }

  // The address, only to compare: the storage may have been destroyed.
  [[nodiscard]] const c10::StorageImpl* identity() const { return storage_._unsafe_get_target(); }

  // Notes that the bytes are about to be written to: from now on nobody finds them here, whoever holds them.
  void part() { has_parted_ = true; }
  [[nodiscard]] bool has_parted() const { return has_parted_; }

  // Whether `storage` is the source, and has other memory than at its save.
  [[nodiscard]] bool was_swapped(const c10::StorageImpl& storage) const {
    return &storage == identity() && storage.data() != data_;
  }

  // The storage, if somebody still holds it. A source with other memory than at its save is returned, too, as autograd
  // without hooks would read that memory; but not inside a recipe, whose inputs must be as they were saved. The result
  // may be the last reference: its end may run other people's code.
  [[nodiscard]] c10::Storage lock() const;

 private:
  const std::size_t bytes_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* const data_;
  std::atomic<bool> has_parted_{false};
};

// The bytes of one saved storage, and where they are: on the device, in a block of the tier, or nowhere, with a recipe
// to make them again. SavedBytes knows nothing of autograd, nor of who uses the bytes.
//
// kResident   The source itself is held. Every storage starts in this state, and stays in it if the policy keeps the
//             storage or the tier is full.
// kOffDevice  The bytes are in their home, or on their way there, or nowhere, with a recipe. The source is not held
//             here. If the stash or the program still has the source, find() returns it.
// kRestored   The bytes are on the device again, or on their way (Fetched knows), for each stream that has asked. Home
//             and recipe are kept, so that the bytes on the device can be let go of and fetched again.
//
// Note [Where bytes go]
// from        to          by
// kResident   kOffDevice  leave: a copy out has been started; drop: there is a recipe
// kOffDevice  kRestored   restore: a copy in has been started, the recipe has run, or the source is held again
// kRestored   kOffDevice  release: no use is pending; cancel: the copy was unclaimed; forget: the copy in has failed
//
// Note [Asked for again]
// A backward may ask for the same save more than once (a custom function that calls get_saved_variables twice), and is
// entitled to the bytes each time. The storage that was handed out is remembered weakly: as long as somebody holds that
// storage, the next unpack gets it, too.
//
// Threads: one at a time: the owner's lock. No member asks for device memory, waits for a copy or runs a recipe. What
// members return is to be destroyed without that lock.
class SavedBytes {
 public:
  // What was restored: for the stream that asked first, and for other streams.
  struct Copies {
    std::shared_ptr<Fetched> first;
    std::vector<std::shared_ptr<Fetched>> on_other_streams;
  };

  // A source on its way into the stash, which holds the source until the copy out is done.
  struct Leaving {
    Stash::Place place;
    Stash::Departure departure;
  };

  // The source, and the lease that counts it.
  struct Dropped {
    std::shared_ptr<Gauge::Lease> on_device;
    c10::Storage source;
  };

  // `source` is the storage's of `as_saved`. Both arguments must outlive this object.
  SavedBytes(Residency& residency, const Source& as_saved, c10::Storage source);

  [[nodiscard]] bool is_resident() const { return state_ == State::kResident; }
  [[nodiscard]] bool is_off_device() const { return state_ == State::kOffDevice; }
  [[nodiscard]] const c10::Storage& resident() const { return resident_; }
  [[nodiscard]] Recipe* recipe() const { return recipe_.get(); }  // never changes once the bytes have left

  // Lives while ebb refers to the source: resident or in the stash, and from there restored or lent. Never changes.
  [[nodiscard]] const std::weak_ptr<Gauge::Lease>& held_by_ebb() const { return source_lease_; }

  // How many references to the source ebb has, each of which has the lease, too.
  [[nodiscard]] std::size_t references_of_ebb() const {
    return static_cast<std::size_t>(source_lease_.use_count() - (lent_ != nullptr ? 1 : 0));
  }

  // Counts the source of a storage that stays, as held on the device, by this lease; an earlier lease comes back.
  void count_source(Gauge::Lease& lease);

  // Whether the source is resident, and of the sizes and in the memory that it was saved in.
  [[nodiscard]] bool is_as_saved() const {
    return is_resident() && !as_saved_.has_parted() && has_its_memory(resident_);
  }

  // Whether the program has resized the source, or given it other memory, while the source was held here. A recipe's
  // inputs must be as they were saved.
  [[nodiscard]] bool source_has_changed() const;

  // Whether nobody else has the source.
  [[nodiscard]] bool is_the_last_to_hold_source() const;

  // Starts the copy out to the block, behind the work given to the stream so far. Throws, and does nothing, where the
  // copy cannot be queued.
  [[nodiscard]] Leaving leave(Block block, c10::Stream stream);

  // Lets go of the source, which `recipe` makes again.
  [[nodiscard]] Dropped drop(std::unique_ptr<Recipe> recipe);

  // The source has parted: `copy` takes its place where it is resident. Returns what refers to it, and the ticket of
  // the copy out, which whoever is to write has to wait for.
  struct Parted {
    c10::Storage source;
    std::shared_ptr<Fetched> restored;
    Ticket copied_out;
  };
  [[nodiscard]] Parted part(c10::Storage copy);

  // The bytes, if they have not left the device; throws c10::Error otherwise. See Note [CUDA graphs] in save_hook.h.
  // `source`: of Source::lock().
  [[nodiscard]] c10::Storage for_capture(const c10::Storage& source) const;

  // The restored bytes that work on `stream` may use: those in the memory of `stream` only, because nothing orders
  // another stream's work with the work on `stream` (R4, R5 in docs/design.md). Null for none.
  [[nodiscard]] std::shared_ptr<Fetched> restored_on(c10::Stream stream) const;

  // The storage that was handed out on `stream`, if somebody still holds it: see Note [Asked for again].
  [[nodiscard]] c10::Storage handed_out_on(c10::Stream stream) const;
  void remember(const c10::Storage& storage, c10::Stream stream);

  // Lends `source`, which is alive, to a node, as long as the bytes are not restored.
  void lend_source();

  // Bytes for restore(): the source, for a prefetch; and `memory`, into which a copy in is started, behind the work
  // given to `stream` so far. The second throws where the copy cannot be queued.
  [[nodiscard]] std::shared_ptr<Fetched> held(c10::Storage source, c10::Stream stream, Gauge::Lease window);
  [[nodiscard]] std::shared_ptr<Fetched> fetch(c10::Storage memory, c10::Stream stream, Gauge::Lease window);

  // Makes `fetched` the restored copy. An unclaimed prefetch for another stream is replaced and returned; a claimed
  // copy on another stream stays for the pending uses there, and `fetched` is kept beside it.
  [[nodiscard]] std::shared_ptr<Fetched> restore(std::shared_ptr<Fetched> fetched);

  // -> kOffDevice, as the table says. cancel() returns null where nothing is unclaimed.
  [[nodiscard]] Copies release() noexcept;
  [[nodiscard]] std::shared_ptr<Fetched> cancel() noexcept;
  void forget(const std::shared_ptr<Fetched>& failed) noexcept;

 private:
  enum class State : std::uint8_t { kResident, kOffDevice, kRestored };

  // A storage that was handed out, and on which stream. The reference is weak: the program decides how long the storage
  // lives.
  struct HandedOut {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    c10::Stream stream;
  };

  void go(State from, State to);
  [[nodiscard]] bool has_its_memory(const c10::Storage& storage) const {
    return storage.nbytes() == as_saved_.bytes() && storage.data() == as_saved_.data();
  }
  void count_if_still_held();

  Residency& residency_;
  const Source& as_saved_;
  State state_ = State::kResident;

  c10::Storage resident_;                           // kResident
  std::shared_ptr<Gauge::Lease> on_device_;         // kResident
  const std::weak_ptr<Gauge::Lease> source_lease_;  // counts the source once, whoever of ebb holds it
  std::shared_ptr<Gauge::Lease> lent_;              // of a source that was handed out and that a node still uses

  std::optional<HomeBlock> home_;  // kOffDevice, kRestored: this or a recipe
  std::unique_ptr<Recipe> recipe_;
  Copies restored_;                    // kRestored
  std::vector<HandedOut> handed_out_;  // at most one for each stream
};

}  // namespace ebb
