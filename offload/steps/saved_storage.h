#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include "offload/accounts/gauge.h"
#include "offload/cache/residency.h"
#include "offload/cache/saved_bytes.h"
#include "offload/steps/eviction_queue.h"
#include "offload/steps/saved_step.h"
#include "streams/base/block_pool.h"
#include "streams/base/mutex.h"

namespace ebb {

class StepRecorder;
class Steps;

// The bytes that one or more saves share, in one version, and the uses that backward makes of the bytes. A SavedStorage
// lives as long as the saves.
//
// Note [Pending uses]
// Autograd destroys a save when its node has run, but with retain_graph it may unpack the save again. A fetched copy is
// needed until each of the storage's saves has been unpacked once since the fetch. Such a round of unpacks then ends,
// the copy is released, and every save is pending again. A repeated unpack within one backward pass (Note [Asked for
// again]) is no use of its own: the repetition ends no round, and the step is not told, because it would take the
// repetition for a second pass over the graph.
//
// Threads: every public member may be called from any thread. The mutex is held while a copy is started, and neither
// while device memory is asked for, nor while a copy is waited for, nor while a recipe runs. A tier whose copies out
// run at once (HostMemory::kPageable) holds the mutex for as long as the copy takes.
class SavedStorage final : public std::enable_shared_from_this<SavedStorage> {
 public:
  // One save's share in the storage. Destroyed with the save.
  class Use {
   public:
    explicit Use(std::shared_ptr<SavedStorage> storage);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // Returns the bytes on the device, ready for work on the calling thread's current stream, and prefetches the
    // storages that are expected next. Throws c10::OutOfMemoryError, the error that a copy failed with, or an error of
    // Recipe::run; the caller may then call get() again. Throws c10::Error in a forked child.
    [[nodiscard]] c10::Storage get();

    [[nodiscard]] const std::shared_ptr<SavedStorage>& storage() const { return storage_; }

   private:
    friend class SavedStorage;
    const std::shared_ptr<SavedStorage> storage_;
    // The round in which this use last got the bytes, and the backward pass that got them, as LibTorch numbers backward
    // passes; -1 outside of any backward. Guarded by the storage's mutex.
    std::uint64_t seen_ = 0;
    int seen_by_ = -1;
  };

  // `steps` must live as long as `residency`.
  SavedStorage(std::shared_ptr<Residency> residency, Steps& steps, std::shared_ptr<SavedStep> step, c10::Storage source,
               c10::VariableVersion version, bool is_of_region);
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  [[nodiscard]] std::size_t bytes() const { return source_.bytes(); }
  [[nodiscard]] const Source& source() const { return source_; }
  [[nodiscard]] const std::shared_ptr<Residency>& residency() const { return residency_; }

  // As SavedBytes' members of these names.
  [[nodiscard]] std::weak_ptr<const void> held_by_ebb();
  [[nodiscard]] bool source_has_changed();

  // How many recipes run one inside the other to make the bytes; 0 without a recipe.
  [[nodiscard]] int recipe_depth();

  // Whether a checkpointed region can make the bytes again, whatever is decided about them.
  [[nodiscard]] bool is_of_region() const { return is_of_region_; }

  // Sets the storage's ordinal, the recorder of its step (null for none), and the index that the recorder gave it.
  // Called before any other member.
  void enter_step(std::uint32_t ordinal, std::shared_ptr<StepRecorder> recorder, std::uint32_t index_in_record);

  // The storage's index in this recorder's record; nullopt if the storage is not recorded, or by another recorder.
  [[nodiscard]] std::optional<std::uint32_t> index_in(const StepRecorder& recorder) const;

  // Counts the source of a storage that stays, for now, as held on the device, and tells the recorder. offload() counts
  // the source, too, once the stash has room.
  void stays();

  // Lets evictions take the bytes. `stream`: the stream that the bytes were made on.
  void may_be_evicted(c10::Stream stream);

  // Copies out the bytes of a storage that is resident. `stream`: the stream that made the bytes; this stream is made
  // to wait for the copy, so that the memory can be let go at once. Returns false, and does nothing, where the storage
  // is not resident, waits for a deferred copy or has changed since its save. The same goes for a storage that others
  // use, too, that is locked, or that finds no room in the tier. Throws the tier's error if the copy cannot be started.
  // Waits for no lock, because the caller may hold the device allocator's lock.
  [[nodiscard]] bool evict(c10::Stream stream);

  // Starts the copy out, behind the work given to `stream` so far, and hands the source to the stash.
  void offload(Block block, c10::Stream stream);

  // Offload the storage in two parts: defer_offload() notes the block and the stream, and offload_deferred() starts the
  // copy out. The storage is resident until the second call, and stays resident if the copy then cannot be started. See
  // Note [Saved before it is filled] in deferred_copies.h.
  void defer_offload(Block block, c10::Stream stream);
  void offload_deferred() noexcept;

  // Has this done with the bytes where backward first gets them; `by_recipes`: or a recipe. The record takes the time
  // for that of the storage's recipe.
  void at_first_use(std::function<void(const c10::Storage&)> what, bool by_recipes);

  // To be called before an operation on the calling thread's current stream writes to the source's memory: the bytes
  // stay as they were saved. Does not block the host on a GPU. `copy_of`: a copy made on that stream, which is asked
  // for where the source is resident. Throws what that throws.
  void part_from_source(const std::function<c10::Storage(const c10::Storage&)>& copy_of);

  // Whether the program holds the source.
  [[nodiscard]] bool is_held_by_program();

  // Lets go of the source, which `recipe` makes again.
  void drop(std::unique_ptr<Recipe> recipe);

  // Starts the copy in before backward asks for the bytes, or holds the source if it is still alive, if the window has
  // room. `held_bytes`: with a plan, the most bytes that ebb may hold on the device with this copy, without what
  // recipes and second runs of regions have made; this bound then takes the place of the window's. Returns false if
  // there is no room or the copy cannot be started; backward then fetches the bytes when it asks for them. With
  // Steps::sources_beside_window sources that are alive take no room in the window. Over the stash's limit, which then
  // bounds them, the call returns true and keeps nothing: the source may live until backward asks.
  bool prefetch(std::optional<std::uint64_t> held_bytes);
  static bool start_prefetch(SavedStorage& storage, std::optional<std::uint64_t> held_bytes);  // for SavedStep

  // Lets go of a copy that is an unclaimed prefetch, unless another thread is just about to use the copy. Waits for no
  // lock, because the caller may hold the device allocator's lock.
  void cancel_prefetch();

 private:
  struct DeferredCopy {
    Block block;
    c10::Stream stream;
  };

  // Where the storage is in its step. Written once, under the mutex: another thread may share the storage already.
  struct InStep {
    std::uint32_t ordinal = SavedStep::kNotPlanned;
    std::uint32_t index_in_record = 0;
    std::shared_ptr<StepRecorder> recorder;
    std::optional<SavedStep::Id> id;  // when a copy out begins
  };

  // Note [Pending uses].
  struct Round {
    std::uint64_t number = 1;
    std::uint64_t told = 0;  // the last round that the step has heard of
    std::size_t uses = 0;
    std::size_t pending = 0;  // uses that have not got the bytes in this round
  };

  [[nodiscard]] std::function<void(const c10::Storage&)> take_at_first_use();
  [[nodiscard]] c10::Storage get_on(c10::Stream stream, Use& use);
  [[nodiscard]] c10::Storage find(c10::Stream stream);
  [[nodiscard]] c10::Storage recompute(c10::Stream stream);
  [[nodiscard]] c10::Storage take_memory();
  [[nodiscard]] bool take_room(std::uint64_t more, std::optional<std::uint64_t> held_bytes, Gauge::Lease& room);
  [[nodiscard]] c10::Storage wait_for(const std::shared_ptr<Fetched>& fetched);
  [[nodiscard]] SavedBytes::Leaving leave_locked(Block block, c10::Stream stream, SavedStep::Went when)
      EBB_REQUIRES(mutex_);
  void prefetched_locked(const std::shared_ptr<Fetched>& fetched) EBB_REQUIRES(mutex_);

  // Whether the step has yet to hear of a use in this round; whether a recipe makes the bytes.
  struct Marked {
    bool is_first;
    bool is_made_again;
  };
  Marked mark_used(Use& use, int pass, const c10::Storage& storage, c10::Stream stream);
  [[nodiscard]] SavedBytes::Copies end_round_locked() noexcept EBB_REQUIRES(mutex_);

  const std::shared_ptr<Residency> residency_;
  Steps& steps_;
  const std::shared_ptr<SavedStep> step_;
  const c10::VariableVersion version_;  // kept alive for VersionId
  const bool is_of_region_;
  Source source_;
  const Gauge::Lease if_kept_;

  Mutex recompute_mutex_ EBB_ACQUIRED_BEFORE(mutex_);  // held while the recipe runs
  Mutex mutex_;
  SavedBytes bytes_ EBB_GUARDED_BY(mutex_);
  std::optional<DeferredCopy> deferred_ EBB_GUARDED_BY(mutex_);        // while resident
  std::optional<EvictionQueue::Id> evictable_ EBB_GUARDED_BY(mutex_);  // the same
  std::function<void(const c10::Storage&)> at_first_use_ EBB_GUARDED_BY(mutex_);
  bool first_use_is_by_recipes_ EBB_GUARDED_BY(mutex_) = false;
  InStep in_step_;
  Round round_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
