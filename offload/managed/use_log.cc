#include "offload/managed/use_log.h"

#include <utility>

namespace ebb {

void UseLog::step_begins() {
  if (has_begun_ && had_backward_ && ++with_backward_ > 1 && now_.size() < kMostUses) {
    last_ = std::move(now_);
  }
  now_.clear();
  phase_ = Phase::kForward;
  has_begun_ = true;
  had_backward_ = false;
}

void UseLog::backward_begins() {
  phase_ = Phase::kBackward;
  had_backward_ = true;
}

void UseLog::backward_is_over() { phase_ = Phase::kBetween; }

void UseLog::use(std::uint32_t item, std::uint64_t bytes, bool written) {
  if (!now_.empty() && now_.back().item == item && now_.back().phase == phase_) {
    now_.back().written = now_.back().written || written;
    return;
  }
  note({.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = written});
}

void UseLog::made(std::uint32_t item, std::uint64_t bytes) {
  ++operation_;
  note({.item = item, .operation = operation_, .bytes = bytes, .phase = phase_, .written = true, .is_new = true});
}

void UseLog::note(const ManagedUse& use) {
  if (has_begun_ && now_.size() < kMostUses) {
    now_.push_back(use);
  }
}

}  // namespace ebb
