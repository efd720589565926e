#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include "offload/report/gauge.h"
#include "offload/residency/evictable.h"
#include "offload/residency/fetched.h"
#include "offload/residency/prefetchable.h"
#include "offload/residency/tape.h"
#include "streams/base/block.h"
#include "streams/base/ticket.h"

namespace ebb {

class Residency;
class Recipe;
class StepRecorder;

// The bytes that one or more saves share, in one version, and where they are. Lives as long as the saves.
//
//   kKept --send_out / drop--> kAway <--fetch or recompute / let_go--> kBack
//
// kKept  the source itself is held. Where every storage starts, and where the policy or a full tier leaves it.
// kAway  the bytes are in a block of the tier, or on their way there (`left_` tells), or nowhere, with a recipe to make
//        them again; the source is not held here, though the stash, or the user, may still have it, and then it is what
//        uses get.
// kBack  the bytes are on the device again, or on their way (Fetched knows). The block is kept, so that after the last
//        pending use the device copy can be let go and fetched again, as retain_graph needs; so is the recipe.
//
// Note [Pending uses]
// Autograd destroys a save when its node has run, but with retain_graph it may unpack it again. A fetched copy is
// needed until each of the storage's saves has been unpacked once since the fetch; then every save is pending again.
//
// Note [Asked for again]
// A backward may ask for the same save more than once (a custom function that calls get_saved_variables twice), and
// each time is entitled to the bytes. What was handed out is remembered weakly: as long as somebody holds it, that is
// what the next one gets. A repetition within one backward pass is no use of its own: it ends no round, and the tape,
// which would take it for a second pass over the graph, hears nothing of it.
//
// Threads: every member may be called from any thread. The mutex is held while copies are started, not while one is
// waited for or a recipe runs; but a tier whose copies out run at once (HostMemory::kPageable) makes starting one take
// as long.
class SavedStorage final : public Prefetchable, public Evictee, public std::enable_shared_from_this<SavedStorage> {
 public:
  // One save's share. Destroyed with the save.
  class Use {
   public:
    explicit Use(std::shared_ptr<SavedStorage> storage);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // The bytes on the device, ready for work on the calling thread's current stream; fetches what comes next ahead.
    // Throws c10::OutOfMemoryError, or what a copy failed with; it may then be called again. Throws c10::Error in a
    // forked child.
    [[nodiscard]] c10::Storage get();

    [[nodiscard]] const std::shared_ptr<SavedStorage>& storage() const { return storage_; }

   private:
    friend class SavedStorage;
    const std::shared_ptr<SavedStorage> storage_;
    std::uint64_t seen_ = 0;  // LOCK: storage_->mutex_, as the next. The round in which this use last got the bytes
    int seen_by_ = -1;        // the backward pass that got them, as LibTorch numbers them; -1 outside of any
  };

  SavedStorage(std::shared_ptr<Residency> residency, std::shared_ptr<Tape> tape, c10::Storage source,
               c10::VariableVersion version);
  ~SavedStorage() override;
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  // Its place among the step's candidates, and what the step is recorded by, or null. Before anything else is called.
  void enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder, std::uint32_t index_in_record);

  // It is not sent out, nor dropped, for now.
  void stays();

  // Has it wait in Residency::evictable. `stream`: on which it was saved.
  void may_be_evicted(c10::Stream stream);

  // kKept -> kAway, of one that the policy has kept.
  [[nodiscard]] bool evict(c10::Stream stream) override;

  // Where it is in that record; nullopt if it is not recorded, or by another one.
  [[nodiscard]] std::optional<std::uint32_t> index_in(const StepRecorder& recorder) const;

  [[nodiscard]] const std::shared_ptr<Residency>& residency() const { return residency_; }

  // Lives while ebb refers to the source: kept, or in the stash.
  [[nodiscard]] std::weak_ptr<const void> held_by_ebb() const { return source_lease_; }

  // Only to compare: the storage itself may be gone.
  [[nodiscard]] const c10::StorageImpl* source_identity() const { return source_identity_; }

  // kKept -> kAway: starts the copy out, behind the work given to `stream` so far, and hands the source to the stash.
  void send_out(Block block, c10::Stream stream);

  // The same in two parts: kept until the second, and for good if the copy then cannot start. See Note [Saved before it
  // is filled] in put_off.h.
  void send_out_later(Block block, c10::Stream stream);
  void send_out_now() noexcept;

  // kKept -> kAway: lets go of the source, which `recipe` makes again.
  void drop(std::unique_ptr<Recipe> recipe);

  // How many recipes run one inside the other to have the bytes; 0 without.
  [[nodiscard]] int recipe_depth();

  // Throws c10::Error in a forked child.
  void check_process() const;

  // Stands for the bytes in tensors that only carry sizes and flags.
  [[nodiscard]] const c10::Storage& no_bytes() const;

  // kAway -> kBack, if the window has room: starts the copy in before anybody asks, or keeps the source where that is
  // still there (beside the window, if Bounds::sources_beside_window: as many bytes as the stash may have).
  bool fetch_ahead(std::optional<std::uint64_t> held_bytes) override;

  // kBack -> kAway
  void drop_guess() override;

  // Whether the program has resized the source, or given it other memory, while it was held here. What a recipe
  // computes from must be as it was saved.
  [[nodiscard]] bool source_has_changed();

 private:
  enum class State : std::uint8_t { kKept, kAway, kBack };

  struct PutOffCopy {
    Block block;
    c10::Stream stream;
  };

  // The bytes on the device again: on the stream that asked first, and on others.
  struct DeviceCopies {
    std::shared_ptr<Fetched> back;
    std::vector<std::shared_ptr<Fetched>> elsewhere;
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

  static const SavedStorage*& fetching_here();
  [[nodiscard]] Leaving start_out(Block block, c10::Stream stream, Tape::Went when);
  c10::Storage get(Use& use);
  c10::Storage get_recorded(Use& use);
  [[nodiscard]] c10::Storage get_for_capture() const;
  c10::Storage find_making_room(c10::Stream stream, bool& device_is_full);
  [[nodiscard]] bool take_room(std::uint64_t bytes, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room);
  c10::Storage find(c10::Stream stream);
  [[nodiscard]] std::optional<c10::Storage> live_source() const;
  [[nodiscard]] bool was_swapped(const c10::StorageImpl& storage) const;
  [[nodiscard]] std::shared_ptr<Fetched> back_on(c10::Stream stream) const;
  [[nodiscard]] std::optional<c10::Storage> handed_out_on(c10::Stream stream) const;
  void remember(const c10::Storage& storage, c10::Stream stream);
  [[nodiscard]] std::shared_ptr<Fetched> comes_back(std::shared_ptr<Fetched> fetched);
  std::shared_ptr<Fetched> fetch(c10::Stream stream, Gauge::Lease window);
  c10::Storage recompute(c10::Stream stream);
  std::shared_ptr<Gauge::Lease> device_lease();
  c10::Storage wait_for(const std::shared_ptr<Fetched>& fetched);
  bool mark_used(Use& use, const c10::Storage& storage, c10::Stream stream);
  DeviceCopies let_go() noexcept;

  const std::shared_ptr<Residency> residency_;
  const std::shared_ptr<Tape> tape_;
  const std::size_t bytes_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const c10::StorageImpl* const source_identity_;
  const void* const source_data_;
  const c10::VariableVersion version_;         // kept alive for VersionId
  std::uint32_t ordinal_ = Tape::kNotPlanned;  // as the next two: written once, under mutex_
  std::uint32_t index_in_record_ = 0;
  std::shared_ptr<StepRecorder> recorder_;
  const Gauge::Lease if_kept_;

  std::mutex recompute_mutex_;  // taken before mutex_; held while the recipe runs

  std::mutex mutex_;
  State state_ = State::kKept;                // LOCK: mutex_, as all below
  c10::Storage kept_;                         // kKept
  std::shared_ptr<Gauge::Lease> on_device_;   // kKept
  std::optional<PutOffCopy> put_off_;         // kKept
  std::weak_ptr<Gauge::Lease> source_lease_;  // the source's bytes are counted once, whoever holds it
  std::shared_ptr<Gauge::Lease> lent_;        // of a source that was handed out: its node holds it after all of us
  std::optional<Tape::Id> on_tape_;           // kAway, kBack, unless there is a recipe
  std::optional<Evictable::Id> evictable_;    // once may_be_evicted
  std::optional<Block> block_;                // kAway, kBack, unless there is a recipe
  std::unique_ptr<Recipe> recipe_;            // kAway, kBack, unless there is a block. Fixed once set
  Ticket left_;                               // the copy out
  std::shared_ptr<Fetched> back_;             // kBack
  std::vector<std::shared_ptr<Fetched>> elsewhere_;  // kBack: on other streams than back_'s
  std::vector<HandedOut> handed_out_;                // at most one for each stream. Note [Asked for again]
  std::uint64_t round_ = 1;                          // Note [Pending uses]
  std::uint64_t told_round_ = 0;                     // the last round of which the tape has been told
  std::size_t uses_ = 0;
  std::size_t pending_ = 0;  // uses that have not got the bytes in this round
};

}  // namespace ebb
