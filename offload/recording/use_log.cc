#include "offload/recording/use_log.h"

#include <utility>

#include "offload/recording/step_recorder.h"

namespace ebb {

void UseLog::step_begins() {
  const MutexLock lock(mutex_);
  if (has_begun_ && had_backward_ && is_usual_ && now_.size() < kMostUses) {
    while (!now_.empty() && now_.back().phase == Phase::kBetween && !now_.back().written) {
      now_.pop_back();
    }
    last_ = std::move(now_);
  }
  now_.clear();
  phase_ = Phase::kForward;
  has_begun_ = true;
  had_backward_ = false;
  is_usual_ = true;
}

void UseLog::record_by(const std::shared_ptr<StepRecorder>& recorder) {
  const MutexLock lock(mutex_);
  recorder_ = recorder;
}

std::shared_ptr<StepRecorder> UseLog::recorder_on(c10::Stream stream) {
  const std::shared_ptr<StepRecorder> recorder = [&] {
    const MutexLock lock(mutex_);
    return recorder_.lock();
  }();
  return recorder != nullptr && recorder->is_on(stream) ? recorder : nullptr;
}

void UseLog::operation_begins() {
  const MutexLock lock(mutex_);
  ++operation_;
}

std::optional<std::vector<ManagedUse>> UseLog::last_period() {
  const MutexLock lock(mutex_);
  return last_;
}

void UseLog::backward_begins() {
  const MutexLock lock(mutex_);
  phase_ = Phase::kBackward;
  had_backward_ = true;
}

void UseLog::backward_is_over(bool failed) {
  const MutexLock lock(mutex_);
  phase_ = Phase::kBetween;
  is_usual_ = is_usual_ && !failed;
}

void UseLog::use(std::uint32_t item, std::uint64_t bytes, bool written) {
  const MutexLock lock(mutex_);
  note_locked({.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = written});
}

void UseLog::made(std::uint32_t item, std::uint64_t bytes, bool follows) {
  const MutexLock lock(mutex_);
  is_usual_ = is_usual_ && follows;
  ++operation_;
  note_locked(
      {.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = true, .is_new = follows});
}

void UseLog::note_locked(const ManagedUse& use) {
  if (has_begun_ && now_.size() < kMostUses) {
    now_.push_back(use);
  }
}

}  // namespace ebb
