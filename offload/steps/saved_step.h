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
class Prefetchable;
class StepRecorder;
class ThreadSteps;

// One step's storages that went away, in the order of saving, and the order in which backward is expected to want them:
// that of the last step that saved the same sizes, or else the reverse of saving. The expectation only decides what is
// prefetched; a use in any other order is just as right.
//
// Note [Saves that are gone]
// A step may live for long, because one of its saves does, while thousands of others come and go. So it forgets a
// storage that ends before backward has begun, and what a backward itself saves (create_graph) it counts and never
// lists: no order is known of that.
//
// Threads: every member may be called from any thread.
class SavedStep : public std::enable_shared_from_this<SavedStep> {
 public:
  static constexpr std::uint32_t kNotPlanned = 0xFFFFFFFF;  // as an ordinal

  // A storage that went away. Ids rise in the order of going.
  using Id = std::uint64_t;

  // `steps`: those of the thread that makes this one.
  SavedStep(std::shared_ptr<AccessHistory> book, std::shared_ptr<ThreadSteps> steps)
      : history_(std::move(book)), steps_(std::move(steps)) {}

  // Tells the access history what was learned.
  ~SavedStep();
  SavedStep(const SavedStep&) = delete;
  SavedStep& operator=(const SavedStep&) = delete;

  // The ordinal of the next storage that the policy is asked about; 0 begins a step.
  [[nodiscard]] std::uint64_t next_candidate();

  // A storage is saved, or a checkpointed region begins: the step lives until each of them has ended.
  void began();

  // All saves of such a storage have ended, or the region has. `gone`: of a storage that went away.
  //
  // Note [Forward passes without backward]
  // Evaluation under a guard, and graphs that are dropped, save and never use. Once all of a step's saves have ended
  // before its backward began, they are forgotten, and the next save begins a step: they must not add up to a step that
  // was never one, which would raise the bounds of stash and window and the ordinals that policies go by, nor disturb
  // the order learned from the steps that are.
  struct Gone {
    Id id;
    std::uint64_t bytes;
  };
  void ended(std::optional<Gone> gone = std::nullopt);

  // Adds a storage that went away, as decided at its save or later; `stream`: on which it was saved; `ordinal`: as
  // Candidate::ordinal.
  enum class Went : bool { kAtItsSave, kLater };
  Id append(std::weak_ptr<Prefetchable> storage, std::uint64_t bytes, c10::Stream stream, std::uint32_t ordinal,
            Went when);

  // The storage that went away last at its save, and the largest of those before it.
  struct LastSave {
    std::uint64_t bytes = 0;
    std::uint64_t largest_before = 0;
  };
  [[nodiscard]] LastSave last_save();

  // What the step is recorded by, and the plan that it follows from now on; null for none.
  void record_by(std::shared_ptr<StepRecorder> recorder);
  void follow(std::shared_ptr<const Plan> plan);
  [[nodiscard]] std::shared_ptr<StepRecorder> recorder();
  [[nodiscard]] std::shared_ptr<const Plan> plan();

  // Backward has begun: it has asked for something that this step saved.
  void begin_use();

  // Backward has asked for this candidate, wherever it is: with a plan, that is how far backward has come. Whether
  // there is a plan.
  bool asked(std::uint32_t ordinal);

  // Backward has asked for this storage.
  void used(Id id);

  // Starts copies in for what comes next, until the window is full, or with a plan its room (PrefetchSchedule). Whether
  // that is now all there is.
  bool prefetch();

  // The same before backward has asked for anything, if it is known in which order it will. `stream`: the calling
  // thread's; copies in belong to it, so it must be the one of the last save, on which backward will begin.
  void prefetch_early(c10::Stream stream);
  [[nodiscard]] bool tried_early() const { return tried_early_; }

  // Whether a step with the same sizes has been seen.
  [[nodiscard]] bool order_is_known();

  // Gives up what was prefetched and nobody has asked for, but for what another thread is just about to use. Where
  // backward covers a part of the graph only, and the graph lives on, it would hold the window, which is for all steps.
  void cancel_prefetches() {
    cancel_prefetches([] { return false; });
  }

  // The same on a device that has no memory left, what is needed last first, until it is enough. For the rest of the
  // pass only what comes next is prefetched, or it would be given up again and again.
  void make_room(const std::function<bool()>& enough);

  // Whether backward has begun.
  [[nodiscard]] bool in_use() const { return in_use_; }

 private:
  struct Entry {
    Id id;
    std::weak_ptr<Prefetchable> storage;
    std::uint64_t bytes;
    std::uint32_t ordinal;
    std::uint64_t used_in = 0;  // the last pass over the graph that has used it
    bool gone = false;
    bool prefetched = false;  // is in unclaimed_
  };

  static constexpr std::uint64_t kFirstPass = 1;

  void cancel_prefetches(const std::function<bool()>& enough);
  void prefetches_locked(Entry& entry) EBB_REQUIRES(mutex_);
  [[nodiscard]] std::vector<Id> take_unclaimed_locked() EBB_REQUIRES(mutex_);
  void begin_use_locked() EBB_REQUIRES(mutex_);
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
  std::atomic<bool> prefetching_{false};  // told `steps_` so

  // Taken before any storage's lock, too; at most one thread prefetches.
  Mutex fetch_mutex_ EBB_ACQUIRED_BEFORE(mutex_);

  Mutex mutex_;
  std::uint64_t candidates_ EBB_GUARDED_BY(mutex_) = 0;
  std::size_t alive_ EBB_GUARDED_BY(mutex_) = 0;          // that have begun and not ended
  std::uint64_t saved_bytes_ EBB_GUARDED_BY(mutex_) = 0;  // of the storages that went away
  std::uint64_t largest_bytes_ EBB_GUARDED_BY(mutex_) = 0;
  std::uint64_t saved_in_backward_bytes_ EBB_GUARDED_BY(mutex_) = 0;  // that live
  Id next_id_ EBB_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ EBB_GUARDED_BY(mutex_);                      // by id. Fixed by the first use
  mutable std::optional<std::uint64_t> signature_ EBB_GUARDED_BY(mutex_);  // of entries_, once it was asked for
  std::size_t gone_ EBB_GUARDED_BY(mutex_) = 0;                            // of the entries
  LastSave last_save_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<StepRecorder> recorder_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<const Plan> plan_ EBB_GUARDED_BY(mutex_);
  std::optional<c10::Stream> last_stream_ EBB_GUARDED_BY(mutex_);  // on which something was saved
  std::vector<std::uint32_t> order_ EBB_GUARDED_BY(mutex_);  // expected, as indices of entries; fixed by the first use
  std::vector<std::uint32_t> rank_ EBB_GUARDED_BY(mutex_);   // of each entry in `order_`
  std::vector<std::uint32_t> observed_ EBB_GUARDED_BY(mutex_);  // what the first pass really did
  std::uint64_t pass_ EBB_GUARDED_BY(mutex_) = kFirstPass;
  std::vector<std::uint32_t> part_of_;  // with a plan: by ordinal, the part of backward that begins with its need
  std::vector<std::uint32_t> last_part_ EBB_GUARDED_BY(mutex_);    // with a plan: of each of `order_`, or kNotPlanned
  std::optional<RangeMinimum> held_bytes_ EBB_GUARDED_BY(mutex_);  // with a plan: PrefetchSchedule::held_bytes
  std::uint32_t part_ EBB_GUARDED_BY(mutex_) = 0;                  // in which backward is
  std::size_t prefetched_to_ EBB_GUARDED_BY(mutex_) = 0;  // rank up to which everything unused has been prefetched
  std::uint64_t resets_ EBB_GUARDED_BY(mutex_) = 0;       // of `prefetched_to_`
  std::vector<Id> unclaimed_ EBB_GUARDED_BY(mutex_);      // what was prefetched since guesses were last given up
  std::size_t cursor_ EBB_GUARDED_BY(mutex_) = 0;         // rank behind the last use
  bool device_is_full_ EBB_GUARDED_BY(mutex_) = false;    // copies ahead were given up for want of room, in this pass
};

}  // namespace ebb
