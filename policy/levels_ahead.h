#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "policy/step_record.h"

namespace ebb {

// The largest level between two moving ends, neither of which moves back.
class LevelsAhead {
 public:
  explicit LevelsAhead(const std::vector<StepRecord::Level>& levels) : levels_(levels) {}

  // Over the levels from index `first` to the last that begins by `ms`; at least that of `first`.
  std::uint64_t most(std::size_t first, double ms) {
    for (; end_ < levels_.size() && (end_ <= first || levels_[end_].ms <= ms); ++end_) {
      while (!falling_.empty() && levels_[falling_.back()].bytes <= levels_[end_].bytes) {
        falling_.pop_back();
      }
      falling_.push_back(end_);
    }
    while (!falling_.empty() && falling_.front() < first) {
      falling_.pop_front();
    }
    return falling_.empty() ? 0 : levels_[falling_.front()].bytes;
  }

 private:
  const std::vector<StepRecord::Level>& levels_;
  std::size_t end_ = 0;
  std::deque<std::size_t> falling_;
};

}  // namespace ebb
