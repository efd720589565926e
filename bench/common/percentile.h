#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace ebb {

// The value below which this fraction (0 to 1) of the values lies, interpolated between the two nearest. Requires at
// least one value.
inline double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double at = fraction * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - std::floor(at)) * (values[above] - values[below]);
}

}  // namespace ebb
