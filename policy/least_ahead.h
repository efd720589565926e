#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

namespace ebb {

// The least of some values between two moving ends, neither of which moves back.
class LeastAhead {
 public:
  explicit LeastAhead(const std::vector<std::uint64_t>& values) : values_(values) {}

  // From index `first` to index `last`, or to the furthest `last` so far; at least that of `first`. 2^64 - 1 for none.
  std::uint64_t least(std::size_t first, std::size_t last) {
    for (; end_ < values_.size() && (end_ <= first || end_ <= last); ++end_) {
      while (!rising_.empty() && values_[rising_.back()] >= values_[end_]) {
        rising_.pop_back();
      }
      rising_.push_back(end_);
    }
    while (!rising_.empty() && rising_.front() < first) {
      rising_.pop_front();
    }
    return rising_.empty() ? std::numeric_limits<std::uint64_t>::max() : values_[rising_.front()];
  }

 private:
  const std::vector<std::uint64_t>& values_;
  std::size_t end_ = 0;
  std::deque<std::size_t> rising_;
};

}  // namespace ebb
