#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "offload/device_meter.h"
#include "offload/plan_report.h"
#include "offload/report/device_account.h"
#include "policy/step_record.h"
#include "streams/base/mutex.h"
#include "streams/base/tier.h"

namespace ebb {

// Observes one forward and backward pass, and makes a StepRecord of it.
//
// Note [The clock of a recorded step]
// Each mark takes a point on the compute stream's clock and the device's memory in use. What ebb makes the stream do
// (copies it waits for, recipes) is marked as a pause, and no time passes in it: what is left is the step as it would
// run without ebb. The points are read when the step is over.
//
// Note [Memory that is not ebb's]
// The other memory is what is in use less what ebb holds, which changes in detours only. So between two other marks its
// peak is the device's less a constant. What happens inside of detours is not part of it; what a recipe takes there for
// itself is StorageRecord::recompute_bytes. When a storage is let go of shows at the next mark only, and the peak
// between may have been before or after: so it is taken to be let go of at the mark before, and counts twice until the
// next one.
//
// Note [Steps that never end]
// While one save lives, thousands of forward passes may come and go without a backward, all in the step that the save
// belongs to. A step most of whose storages were released before backward is none worth a plan, so its record is given
// up, and with it the points in time that it holds.
//
// Threads: every member may be called from any thread; but a step that is on several threads at once, or on several
// streams, has no clock, and gives no record. The meter is never called under the lock: device allocators have locks of
// their own, and ask ebb for memory under them (Note [Out of memory] in out_of_memory.h).
class StepRecorder {
 public:
  // `meter`: empty for none; there is then no other memory.
  StepRecorder(std::shared_ptr<Tier> tier, std::shared_ptr<DeviceAccount> account, DeviceMeter meter,
               std::uint64_t step);
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  // The number that the policy knows it by.
  [[nodiscard]] std::uint64_t step() const { return step_; }

  // A storage is about to be saved; returns its index. `recompute` and `inputs` as in StorageRecord. `held`: lives
  // while ebb refers to the storage, once, as where its copy out is under way: then the forward pass has let go of a
  // storage to which nothing else refers.
  std::uint32_t saved(const c10::Storage& storage, Recompute recompute, std::vector<std::uint32_t> inputs,
                      std::weak_ptr<const void> held = {});

  // A checkpointed region begins; returns its index. It is run again in a ClockPause of its own, at whose end `saves`
  // is what it has saved then. What it took at most besides, at any time, is other memory where it is needed.
  std::uint32_t region_begins(std::vector<std::uint32_t> inputs);
  void region_saves(std::uint32_t index, std::uint64_t bytes) noexcept;

  // It stays on the device, whatever was wanted.
  void kept(std::uint32_t index) noexcept;

  // An operation's backward asks for it, and its last save has ended. A storage that is then still alive elsewhere
  // costs no memory to keep: its record has no bytes.
  void needed(std::uint32_t index) noexcept;
  void released(std::uint32_t index) noexcept;

  void backward_begins() noexcept;

  // Backward is over: waits for the device to get there. nullopt if there was none, or no clock. What a second backward
  // pass over the step does is not recorded.
  [[nodiscard]] std::optional<StepRecord> finish();

  // It will give no record.
  void give_up() noexcept;

  // The same, and it observes nothing more; as where the device had no memory left since it was made.
  void disturb() noexcept { disturbed_ = true; }

  // From its first mark to its last, and the most device memory in use; of a step that is over.
  [[nodiscard]] StepCost cost() const;

  // While it lives, what the stream does is ebb's doing: in general, or the recipe of a storage. They nest, and a
  // recipe has what is inside of it for its inputs.
  class ClockPause {
   public:
    // `recorder` null: none.
    explicit ClockPause(StepRecorder* recorder, std::optional<std::uint32_t> recipe = std::nullopt) noexcept;
    ~ClockPause();
    ClockPause(const ClockPause&) = delete;
    ClockPause& operator=(const ClockPause&) = delete;

   private:
    StepRecorder* const recorder_;
    const std::optional<std::uint32_t> recipe_;
  };

 private:
  enum class What : std::uint8_t { kSaved, kIdle, kNeeded, kReleased, kBackward, kEnd, kPause, kPauseEnd };
  static constexpr std::uint32_t kNoRecipe = 0xFFFFFFFF;

  struct Mark {
    What what;
    std::uint32_t index;  // of the storage; of a pause: kNoRecipe, or the storage's whose recipe it is
    Ticket time;
    std::uint64_t other_bytes;  // now
    std::uint64_t peak_bytes;   // of other memory, since the mark before
  };

  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> source;
    std::weak_ptr<const void> held;
    StorageRecord record;
    bool idle = false;
    bool needed = false;
    bool settled = false;  // whether it is idle, as it is where backward needs it
    bool released = false;
  };

  [[nodiscard]] bool disturbed() const { return disturbed_ || account_->evictions != evictions_before_; }
  void give_up_locked() noexcept EBB_REQUIRES(mutex_);
  void mark(What what, std::uint32_t index, std::uint64_t own_bytes = 0) noexcept EBB_EXCLUDES(mutex_);
  void add_mark(What what, std::uint32_t index, c10::Stream stream, const DeviceUse& use, std::uint64_t own_bytes)
      EBB_REQUIRES(mutex_);
  class Clock;
  [[nodiscard]] std::uint64_t besides_region(const Mark& mark) const EBB_REQUIRES(mutex_);
  [[nodiscard]] StepRecord record() const EBB_REQUIRES(mutex_);

  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<DeviceAccount> account_;
  const DeviceMeter meter_;
  const std::uint64_t step_;
  const std::uint64_t evictions_before_;

  std::atomic<bool> disturbed_{false};

  mutable Mutex mutex_;
  std::vector<Storage> storages_ EBB_GUARDED_BY(mutex_);
  std::vector<std::uint32_t> in_use_ EBB_GUARDED_BY(mutex_);  // by the forward pass; with some that are not any more
  std::size_t next_in_use_ EBB_GUARDED_BY(mutex_) = 0;        // to look at
  std::vector<Mark> marks_ EBB_GUARDED_BY(mutex_);
  std::optional<c10::Stream> stream_ EBB_GUARDED_BY(mutex_);
  std::uint64_t held_bytes_ EBB_GUARDED_BY(mutex_) = 0;  // at the last mark
  // Of other memory, since the last of marks_ and before the last mark.
  std::uint64_t peak_before_ EBB_GUARDED_BY(mutex_) = 0;
  StepCost cost_ EBB_GUARDED_BY(mutex_);
  std::size_t released_early_ EBB_GUARDED_BY(mutex_) = 0;  // storages, before backward
  bool in_backward_ EBB_GUARDED_BY(mutex_) = false;
  bool over_ EBB_GUARDED_BY(mutex_) = false;
  bool usable_ EBB_GUARDED_BY(mutex_) = true;
};

}  // namespace ebb
