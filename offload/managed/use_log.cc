#include "offload/managed/use_log.h"

#include <utility>

namespace ebb {

void UseLog::step_begins() {
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

void UseLog::backward_begins() {
  phase_ = Phase::kBackward;
  had_backward_ = true;
}

void UseLog::backward_is_over(bool failed) {
  phase_ = Phase::kBetween;
  is_usual_ = is_usual_ && !failed;
}

void UseLog::use(std::uint32_t item, std::uint64_t bytes, bool written) {
  note({.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = written});
}

void UseLog::made(std::uint32_t item, std::uint64_t bytes, bool follows) {
  is_usual_ = is_usual_ && follows;
  ++operation_;
  note({.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = true, .is_new = follows});
}

void UseLog::note(const ManagedUse& use) {
  if (has_begun_ && now_.size() < kMostUses) {
    now_.push_back(use);
  }
}

}  // namespace ebb
