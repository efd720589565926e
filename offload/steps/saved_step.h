#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "policy/plan.h"
#include "policy/range_minimum.h"
#include "streams/base/mutex.h"

namespace ebb {

class AccessHistory;
class StepRecorder;
class ThreadSteps;
class TieredStorage;

// The offloaded storages of one step, in the order of saving, and the access order that is expected of backward: the
// order of the last step that saved the same sizes, or else the reverse of saving. The expected order only decides what
// is prefetched; backward may use the storages in any other order.
//
// Note [Saves that are gone]
// A step lives as long as one of its saves does, and thousands of its other saves may begin and end meanwhile. So the
// step forgets a storage that ends before backward has begun. The storages that backward itself saves (create_graph)
// are counted and never listed, because no access order is known of them.
//
// Threads: every member may be called from any thread.
class SavedStep : public std::enable_shared_from_this<SavedStep> {
 public:
  static constexpr std::uint32_t kNotPlanned = 0xFFFFFFFF;  // as an ordinal

  // Names an offloaded storage. Ids rise in the order of offloading.
  using Id = std::uint64_t;

  // `history`: what earlier steps have taught. `steps`: the steps of the thread that makes this step.
  SavedStep(std::shared_ptr<AccessHistory> history, std::shared_ptr<ThreadSteps> steps)
      : history_(std::move(history)), steps_(std::move(steps)) {}

  // Tells the access history the observed order and the sizes, if backward has begun.
  ~SavedStep();
  SavedStep(const SavedStep&) = delete;
  SavedStep& operator=(const SavedStep&) = delete;

  // Returns the ordinal of the next candidate and counts it; 0 begins a step.
  [[nodiscard]] std::uint64_t next_candidate();

  // Notes that a storage is saved, or that a checkpointed region begins. Each call is matched by one call of ended().
  void began();

  // Notes that all saves of such a storage have ended, or that the region has. `gone`: names the storage, if it was
  // offloaded.
  //
  // Note [Forward passes without backward]
  // Evaluation under a guard, and a graph that is dropped, make saves that no backward uses. When all of a step's saves
  // have ended before its backward began, the step forgets them, and the next save begins a step. Otherwise such
  // forward passes would add up to one long step: the bounds of stash and window and the ordinals that policies see
  // would rise, and the access order learned from real steps would be disturbed.
  struct Gone {
    Id id;
    std::uint64_t bytes;
  };
  void ended(std::optional<Gone> gone = std::nullopt);

  // Adds an offloaded storage and returns its id. `stream`: the one that the storage was saved on. `ordinal`: as
  // Candidate::ordinal. `when`: whether the storage was offloaded at its save, or evicted later.
  enum class Went : bool { kAtItsSave, kLater };
  Id append(std::weak_ptr<TieredStorage> storage, std::uint64_t bytes, c10::Stream stream, std::uint32_t ordinal,
            Went when);

  // The bytes of the last storage that was offloaded at its save, and of the largest one before it.
  struct LastSave {
    std::uint64_t bytes = 0;
    std::uint64_t largest_before = 0;
  };
  [[nodiscard]] LastSave last_save();

  // The recorder that observes the step, and the plan that the step follows from now on; null for none.
  void record_by(std::shared_ptr<StepRecorder> recorder);
  void follow(std::shared_ptr<const Plan> plan);
  [[nodiscard]] std::shared_ptr<StepRecorder> recorder();
  [[nodiscard]] std::shared_ptr<const Plan> plan();

  // Notes that backward has begun, by asking for one of this step's saves.
  void begin_use();

  // Notes that backward has asked for this candidate, resident or not. Under a plan the candidate tells which part of
  // backward has begun. Returns whether there is a plan.
  bool asked(std::uint32_t ordinal);

  // Notes that backward has asked for this offloaded storage.
  void used(Id id);

  // Starts copies in of the storages that are expected next, until the window is full, or under a plan until the bytes
  // that PrefetchSchedule allows are held. Returns whether every storage that backward still needs has been prefetched.
  bool prefetch();

  // Prefetches before backward has asked for anything, if the access order is known. `stream`: the calling thread's
  // current stream, whose pool the memory comes from. Nothing happens unless the last save was made on this stream,
  // too, because backward will begin there.
  void prefetch_early(c10::Stream stream);
  [[nodiscard]] bool tried_early() const { return tried_early_; }

  // Whether the access order is known: from a plan, or from an earlier step with the same sizes.
  [[nodiscard]] bool order_is_known();

  // Cancels all unclaimed prefetches, except a copy that another thread is just about to use. A backward that covers
  // only a part of a graph leaves unclaimed copies behind, and a graph that lives on would hold the window with them,
  // which all steps share.
  void cancel_prefetches() {
    cancel_prefetches([] { return false; });
  }

  // Cancels unclaimed prefetches on a device that has no memory left, the storage that is needed last first, until
  // `enough` returns true. For the rest of the backward pass only the storage that is needed next is prefetched;
  // otherwise prefetches would be cancelled again and again.
  void make_room(const std::function<bool()>& enough);

  // Whether backward has begun.
  [[nodiscard]] bool in_use() const { return in_use_; }

 private:
  struct Entry {
    Id id;
    std::weak_ptr<TieredStorage> storage;
    std::uint64_t bytes;
    std::uint32_t ordinal;
    std::uint64_t used_in = 0;  // the last pass over the graph that has used the storage
    bool gone = false;          // the storage ended before backward began
    bool prefetched = false;    // the id is in unclaimed_
  };

  static constexpr std::uint64_t kFirstPass = 1;

  void cancel_prefetches(const std::function<bool()>& enough);
  void prefetches_locked(Entry& entry) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::vector<Id> take_unclaimed_locked() EBB_REQUIRES(mutex_);
  void forget_gone_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::optional<std::uint32_t> index_locked(Id id) const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t signature_locked() const EBB_REQUIRES(mutex_);
  void recall_order_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::vector<std::uint32_t> planned_order_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::optional<std::uint64_t> held_bytes_locked(std::size_t rank) const EBB_REQUIRES(mutex_);
  void prefetches_now();

  const std::shared_ptr<AccessHistory> history_;
  const std::shared_ptr<ThreadSteps> steps_;
  std::atomic<bool> in_use_{false};
  std::atomic<bool> tried_early_{false};
  std::atomic<bool> prefetching_{false};  // `steps_` knows that this step may hold unclaimed copies

  // Held while prefetching, so that at most one thread does. Taken before any storage's lock, too.
  Mutex fetch_mutex_ EBB_ACQUIRED_BEFORE(mutex_);

  Mutex mutex_;
  std::uint64_t candidates_ EBB_GUARDED_BY(mutex_) = 0;
  std::size_t alive_ EBB_GUARDED_BY(mutex_) = 0;          // storages and regions that have begun and not ended
  std::uint64_t saved_bytes_ EBB_GUARDED_BY(mutex_) = 0;  // of the offloaded storages
  std::uint64_t largest_bytes_ EBB_GUARDED_BY(mutex_) = 0;
  // Of the storages that backward saved and that live.
  std::uint64_t saved_in_backward_bytes_ EBB_GUARDED_BY(mutex_) = 0;
  Id next_id_ EBB_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ EBB_GUARDED_BY(mutex_);  // sorted by id; fixed by the first use
  // Of entries_; nullopt until signature_locked() is called.
  mutable std::optional<std::uint64_t> signature_ EBB_GUARDED_BY(mutex_);
  std::size_t gone_ EBB_GUARDED_BY(mutex_) = 0;  // how many entries have ended
  LastSave last_save_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<StepRecorder> recorder_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<const Plan> plan_ EBB_GUARDED_BY(mutex_);
  std::optional<c10::Stream> last_stream_ EBB_GUARDED_BY(mutex_);  // of the last storage that was appended
  // The expected access order, as indices of entries_; fixed by the first use.
  std::vector<std::uint32_t> order_ EBB_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> rank_ EBB_GUARDED_BY(mutex_);  // the position of each entry in order_
  // The access order of the first pass, as indices of entries_.
  std::vector<std::uint32_t> observed_ EBB_GUARDED_BY(mutex_);
  std::uint64_t pass_ EBB_GUARDED_BY(mutex_) = kFirstPass;
  // With a plan: by ordinal, the part of backward that the candidate's need begins. Written under mutex_, and never
  // once backward has begun.
  std::vector<std::uint32_t> part_of_;
  // With a plan: for each rank of order_, CopyIn::last_part or kNotPlanned.
  std::vector<std::uint32_t> last_part_ EBB_GUARDED_BY(mutex_);
  std::optional<RangeMinimum> held_bytes_ EBB_GUARDED_BY(mutex_);  // with a plan: PrefetchSchedule::held_bytes
  std::uint32_t part_ EBB_GUARDED_BY(mutex_) = 0;                  // with a plan: the part that backward has come to
  std::size_t prefetched_to_ EBB_GUARDED_BY(mutex_) = 0;  // every unused storage of a lower rank has been prefetched
  std::uint64_t resets_ EBB_GUARDED_BY(mutex_) = 0;       // how often prefetched_to_ was set back to 0
  std::vector<Id> unclaimed_ EBB_GUARDED_BY(mutex_);      // prefetched since prefetches were last cancelled
  std::size_t cursor_ EBB_GUARDED_BY(mutex_) = 0;         // the rank after that of the last use
  bool device_is_full_ EBB_GUARDED_BY(mutex_) = false;    // make_room() was called in this pass
};

}  // namespace ebb
