#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ebb {

// The minimum of the values between any two indices, in constant time: a sparse table. Making the table of n values
// takes n log n time and memory.
class RangeMinimum {
 public:
  explicit RangeMinimum(std::vector<std::uint64_t> values) {
    const std::size_t count = values.size();
    levels_.push_back(std::move(values));
    for (std::size_t span = 1; 2 * span <= count; span *= 2) {
      const std::vector<std::uint64_t>& half = levels_.back();
      std::vector<std::uint64_t> whole(count - 2 * span + 1);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        whole[i] = std::min(half[i], half[i + span]);
      }
      levels_.push_back(std::move(whole));
    }
  }

  // The minimum of the values from `first` to `last`, both included. Requires first <= last, and `last` to be an index.
  [[nodiscard]] std::uint64_t operator()(std::size_t first, std::size_t last) const {
    const auto level = static_cast<std::size_t>(std::bit_width(last - first + 1) - 1);
    return std::min(levels_[level][first], levels_[level][last + 1 - (std::size_t{1} << level)]);
  }

 private:
  std::vector<std::vector<std::uint64_t>> levels_;  // levels_[k][i]: the minimum of the 2^k values from i on
};

}  // namespace ebb
