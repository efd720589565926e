#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "offload/steps/expected_uses.h"
#include "policy/plan.h"
#include "streams/base/mutex.h"

namespace ebb {

class AccessHistory;
class StepRecorder;
class SavedStorage;

// How many steps of one thread are alive and have a backward that has begun.
using BackwardCount = std::atomic<std::size_t>;

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
  static constexpr std::uint32_t kNotPlanned = ExpectedUses::kNotPlanned;  // as an ordinal

  // Names an offloaded storage. Ids rise in the order of offloading.
  using Id = std::uint64_t;

  // `history`: what earlier steps have taught. `thread`: of the thread that makes this step.
  SavedStep(std::shared_ptr<AccessHistory> history, std::shared_ptr<BackwardCount> thread)
      : history_(std::move(history)), thread_(std::move(thread)) {}

  // Tells the access history the observed order and the sizes, if backward has begun.
  ~SavedStep();
  SavedStep(const SavedStep&) = delete;
  SavedStep& operator=(const SavedStep&) = delete;

  // Begins the step, if nothing of it has been decided about. Returns whether that was so.
  [[nodiscard]] bool begin();

  // Returns the ordinal of the next candidate and counts it.
  [[nodiscard]] std::uint64_t next_candidate();

  // Counts the searches for recipes in the same way.
  [[nodiscard]] std::uint64_t next_search();

  // Lives until the candidates are counted from 0 again.
  [[nodiscard]] std::weak_ptr<const void> pass();

  // Notes that a storage is saved. Each call is matched by one call of ended().
  void began();

  // Notes that all saves of such a storage have ended. `gone`: names the storage, if it was
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
  Id append(std::weak_ptr<SavedStorage> storage, std::uint64_t bytes, c10::Stream stream, std::uint32_t ordinal,
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
  // that PrefetchSchedule allows are held. `start`: SavedStorage::start_prefetch. Returns whether every storage that
  // backward still needs has been prefetched.
  using Start = bool (*)(SavedStorage& storage, std::optional<std::uint64_t> held_bytes);
  bool prefetch(Start start);

  // Prefetches before backward has asked for anything, if the access order is known. `stream`: the calling thread's
  // current stream, whose pool the memory comes from. Nothing happens unless the last save was made on this stream,
  // too, because backward will begin there.
  void prefetch_early(c10::Stream stream, Start start);
  [[nodiscard]] bool tried_early() const { return tried_early_; }

  // Whether the access order is known: from a plan, or from an earlier step with the same sizes.
  [[nodiscard]] bool order_is_known();

  // Notes that a copy that this step has prefetched is cancelled, by Steps or by its storage.
  void prefetch_is_cancelled(bool device_is_full);

  // Of the thread that has made this step.
  [[nodiscard]] const BackwardCount& thread() const { return *thread_; }

  // Whether backward has begun.
  [[nodiscard]] bool in_use() const { return in_use_; }

 private:
  struct Entry {
    Id id;
    std::weak_ptr<SavedStorage> storage;
    std::uint64_t bytes;
    std::uint32_t ordinal;
    bool gone = false;  // the storage ended before backward began
  };

  struct Sizes {  // of the offloaded storages
    std::uint64_t saved_bytes = 0;
    std::uint64_t largest_bytes = 0;
    std::uint64_t saved_in_backward_bytes = 0;  // by backward, and still alive
  };

  void forget_gone_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::optional<std::uint32_t> index_locked(Id id) const EBB_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t signature_locked() const EBB_REQUIRES(mutex_);
  void expect_uses_locked() EBB_REQUIRES(mutex_);

  const std::shared_ptr<AccessHistory> history_;
  const std::shared_ptr<BackwardCount> thread_;
  std::atomic<bool> in_use_{false};
  std::atomic<bool> tried_early_{false};
  std::atomic<bool> follows_plan_{false};  // `expected_` is a plan's; never changes once backward has begun

  std::atomic<bool> is_prefetching_{false};  // at most one thread does

  Mutex mutex_;
  bool has_begun_ EBB_GUARDED_BY(mutex_) = false;
  std::uint64_t candidates_ EBB_GUARDED_BY(mutex_) = 0;
  std::uint64_t searches_ EBB_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const void> pass_ EBB_GUARDED_BY(mutex_);
  std::size_t alive_ EBB_GUARDED_BY(mutex_) = 0;  // storages that have begun and not ended
  Sizes sizes_ EBB_GUARDED_BY(mutex_);
  Id next_id_ EBB_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ EBB_GUARDED_BY(mutex_);  // sorted by id; fixed by the first use
  // Of entries_; nullopt until signature_locked() is called.
  mutable std::optional<std::uint64_t> signature_ EBB_GUARDED_BY(mutex_);
  std::size_t gone_ EBB_GUARDED_BY(mutex_) = 0;  // how many entries have ended
  LastSave last_save_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<StepRecorder> recorder_ EBB_GUARDED_BY(mutex_);
  std::shared_ptr<const Plan> plan_ EBB_GUARDED_BY(mutex_);
  std::optional<c10::Stream> last_stream_ EBB_GUARDED_BY(mutex_);  // of the last storage that was appended
  ExpectedUses expected_ EBB_GUARDED_BY(mutex_);                   // of entries_; the order is fixed by the first use
};

}  // namespace ebb
