#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include "policy/managed_use.h"
#include "streams/base/mutex.h"

namespace ebb {

class StepRecorder;

// The uses of managed storages in one period of a training loop, for a plan. A period lasts from the beginning of a
// step to the beginning of the next, so that the optimizer's uses count, whenever the optimizer runs. Not kept are
// - a period without a backward pass, or with one that failed;
// - a period in which states were made: an optimizer makes them for all parts of a parameter at once, and so uses them
//   as it never does again;
// - the uses after the last one that writes, between steps: evaluation reads there.
//
// Threads: every member may be called from any thread.
class UseLog {
 public:
  // A period with more uses is not kept.
  static constexpr std::size_t kMostUses = std::size_t{1} << 17;

  // `recorder`: of the step that begins, or now goes on, whose clock is to stand still while the device waits for
  // managed storages; null for none.
  void step_begins();
  void record_by(const std::shared_ptr<StepRecorder>& recorder);
  void backward_begins();
  void backward_is_over(bool failed);

  // That recorder, if its clock is this stream's; else null.
  [[nodiscard]] std::shared_ptr<StepRecorder> recorder_on(c10::Stream stream);

  // Says that the uses from here on are another operation's.
  void operation_begins();

  // Notes a use, once for each item of an operation.
  void use(std::uint32_t item, std::uint64_t bytes, bool written);

  // Notes that a storage has been made, with its bytes. `follows`: one that follows another in its place, as gradients
  // do, and not a state.
  void made(std::uint32_t item, std::uint64_t bytes, bool follows);

  // The uses in the last period that was kept; nullopt before there is one.
  [[nodiscard]] std::optional<std::vector<ManagedUse>> last_period();

 private:
  void note_locked(const ManagedUse& use) EBB_REQUIRES(mutex_);

  Mutex mutex_;
  std::weak_ptr<StepRecorder> recorder_ EBB_GUARDED_BY(mutex_);
  std::optional<std::vector<ManagedUse>> last_ EBB_GUARDED_BY(mutex_);
  std::vector<ManagedUse> now_ EBB_GUARDED_BY(mutex_);
  Phase phase_ EBB_GUARDED_BY(mutex_) = Phase::kForward;
  std::uint32_t operation_ EBB_GUARDED_BY(mutex_) = 0;
  bool has_begun_ EBB_GUARDED_BY(mutex_) = false;
  bool had_backward_ EBB_GUARDED_BY(mutex_) = false;
  bool is_usual_ EBB_GUARDED_BY(mutex_) = true;  // nothing has failed, and no states were made
};

}  // namespace ebb
