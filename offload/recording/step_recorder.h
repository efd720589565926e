#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/accounts/device_account.h"
#include "offload/device_meter.h"
#include "offload/plan_report.h"
#include "policy/step_record.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// Observes one forward and backward pass, and makes a StepRecord of the two.
//
// Note [The clock of a recorded step]
// Each mark takes a point on the compute stream's clock and the device's memory in use. What ebb makes the stream do
// (waiting for copies, running recipes) is marked as a clock pause, in which no time passes. So the times are those of
// the step without ebb. The points are read when the step is over.
//
// Note [Memory that is not ebb's]
// The other memory is the memory in use less the bytes that ebb holds. The bytes that ebb holds change in clock pauses
// only, so between two marks outside of pauses the peak of the other memory is the device's peak less a constant.
// Memory that is in use inside of pauses is not part of the other memory; the memory that a recipe takes there for
// itself is StorageRecord::recompute_bytes. The moment at which the forward pass lets go of a storage shows at the next
// mark only, and the peak between two marks may have been before or after that moment. So the storage is taken to be
// let go of at the earlier mark, and counts twice until the later one. Without a meter there is no other memory, and a
// storage counts from its save on, unless the program still holds it when backward asks for it.
//
// Note [Steps that never end]
// While one save lives, thousands of forward passes may run without a backward, all in the step that the save belongs
// to. A step most of whose storages were released before backward is not worth a plan, so its record is given up, and
// with the record its points in time.
//
// Threads: every member may be called from any thread; but a step that is on several threads at once, or on several
// streams, has no clock, and gives no record. The meter is never called under the lock: device allocators have locks of
// their own, and ask ebb for memory under them (Note [Out of memory] in out_of_memory.h).
class StepRecorder {
 public:
  // `meter`: tells the device's memory in use; empty for none, and the other memory is then taken as 0. `step`: as
  // step().
  StepRecorder(std::shared_ptr<Tier> tier, std::shared_ptr<DeviceAccount> account, DeviceMeter meter,
               std::uint64_t step);
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  // The number that the policy knows the step by.
  [[nodiscard]] std::uint64_t step() const { return step_; }

  // Whether the step's clock is this stream's.
  [[nodiscard]] bool is_on(c10::Stream stream) const;

  // Notes that a storage is about to be saved, and returns its index. `recompute`, `inputs`: as in StorageRecord.
  // `run`: the number of the run that makes the storage again together with others, as Recipe::run_of_several(); 0 for
  // none. `is_for_recipes`: autograd does not save the storage, or only later. `held`: lives while ebb itself holds one
  // reference to the storage, as the stash does. The forward pass has let go of the storage when nothing but this
  // reference is left; an object of Python's, idle or not, counts as the program's.
  std::uint32_t saved(const c10::Storage& storage, Recompute recompute, std::vector<std::uint32_t> inputs,
                      std::weak_ptr<const void> held = {}, std::uint64_t run = 0, bool is_for_recipes = false);

  // Notes that the storage stays on the device, whatever the policy has decided.
  void kept(std::uint32_t index) noexcept;

  // Mark that an operation's backward asks for the storage, and that the storage's last save has ended. A storage that
  // the program still holds when backward asks for it costs no memory to keep, so its record has no bytes.
  void needed(std::uint32_t index) noexcept;
  void released(std::uint32_t index) noexcept;

  void backward_begins() noexcept;

  // Notes that a later step may have recipes that this one has not.
  void awaits_recipes() noexcept { awaits_recipes_ = true; }

  struct Outcome {
    std::optional<StepRecord> record{};  // nullopt if no backward has used the step, or the step had no clock
    StepCost cost{};                     // where there is a record: from the first mark to the last
    bool found_device_full = false;      // whether there is no record because the device had no memory left
  };
  // Ends the record when backward is over, and waits until the device has come to this point. A second backward pass
  // over the step is not recorded.
  [[nodiscard]] Outcome finish();

  // Ends the recording: the step will give no record.
  void give_up() noexcept;

  // Has finish() return no record, and nothing more is observed. An eviction since the recorder was made has the same
  // effect.
  void disturb() noexcept { disturbed_ = true; }

  // While a ClockPause lives, the stream's work is ebb's, and no time passes in the record. `index`: of the storage
  // whose recipe runs in the pause, or kManaged for a wait for managed storages. Pauses nest; the pauses inside of a
  // recipe's are for its inputs, or are waits for managed storages amid its operations.
  class ClockPause {
   public:
    static constexpr std::uint32_t kNoRecipe = 0xFFFFFFFF;
    static constexpr std::uint32_t kManaged = 0xFFFFFFFE;

    // `recorder`: null for no effect.
    explicit ClockPause(StepRecorder* recorder, std::uint32_t index = kNoRecipe) noexcept
        : recorder_(recorder), index_(index) {
      if (recorder_ != nullptr) {
        recorder_->mark(What::kPause, index_);
      }
    }
    ~ClockPause() {
      if (recorder_ != nullptr) {
        recorder_->mark(What::kPauseEnd, index_);
      }
    }
    ClockPause(const ClockPause&) = delete;
    ClockPause& operator=(const ClockPause&) = delete;

   private:
    StepRecorder* const recorder_;
    const std::uint32_t index_;  // of the marks
  };

 private:
  enum class What : std::uint8_t { kSaved, kIdle, kNeeded, kReleased, kBackward, kEnd, kPause, kPauseEnd };
  static constexpr bool is_recipe(std::uint32_t index) { return index < ClockPause::kManaged; }

  struct Mark {
    What what;
    std::uint32_t index;  // of the storage; of a pause, the storage whose recipe runs, kManaged or kNoRecipe
    Ticket time;
    std::uint64_t other_bytes;  // at the mark
    std::uint64_t peak_bytes;   // the peak of other memory since the mark before
  };

  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> source;
    std::weak_ptr<const void> held;
    StorageRecord record;
    std::uint64_t run = 0;
    bool idle = false;
    bool needed = false;  // `idle` changes no more, once this need is marked
    bool released = false;
  };

  [[nodiscard]] bool met_eviction() const { return account_->evictions != evictions_before_; }
  [[nodiscard]] bool disturbed() const { return disturbed_ || met_eviction(); }
  [[nodiscard]] std::uint32_t add(Storage storage) EBB_EXCLUDES(mutex_);
  void give_up_locked() noexcept EBB_REQUIRES(mutex_);
  void mark(What what, std::uint32_t index) noexcept EBB_EXCLUDES(mutex_);
  void add_mark(What what, std::uint32_t index, c10::Stream stream, const DeviceUse& use) EBB_REQUIRES(mutex_);
  class Clock;
  [[nodiscard]] StepRecord record() const EBB_REQUIRES(mutex_);
  void put_together(StepRecord& record) const EBB_REQUIRES(mutex_);

  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<DeviceAccount> account_;
  const DeviceMeter meter_;
  const std::uint64_t step_;
  const std::uint64_t evictions_before_;

  std::atomic<bool> disturbed_{false};
  std::atomic<bool> awaits_recipes_{false};

  mutable Mutex mutex_;
  std::vector<Storage> storages_ EBB_GUARDED_BY(mutex_);
  // The storages that the forward pass uses; some may be idle by now.
  std::vector<std::uint32_t> in_use_ EBB_GUARDED_BY(mutex_);
  std::size_t next_in_use_ EBB_GUARDED_BY(mutex_) = 0;  // the index in in_use_ that the next mark looks at first
  std::vector<Mark> marks_ EBB_GUARDED_BY(mutex_);
  std::optional<c10::Stream> stream_ EBB_GUARDED_BY(mutex_);
  std::uint64_t held_bytes_ EBB_GUARDED_BY(mutex_) = 0;  // at the last mark
  // The peak of other memory at a mark that was taken back, for the next mark.
  std::uint64_t peak_before_ EBB_GUARDED_BY(mutex_) = 0;
  std::uint64_t most_in_use_bytes_ EBB_GUARDED_BY(mutex_) = 0;
  std::size_t released_early_ EBB_GUARDED_BY(mutex_) = 0;  // how many storages were released before backward
  bool in_backward_ EBB_GUARDED_BY(mutex_) = false;
  bool over_ EBB_GUARDED_BY(mutex_) = false;
};

}  // namespace ebb
