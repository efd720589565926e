#pragma once

#include <cstdint>

namespace ebb {

// The slope of a line through points, by least squares. Takes one point after another and keeps none.
class Trend {
 public:
  void add(double x, double y);

  // Of y over x; 0 for fewer than two points.
  [[nodiscard]] double slope() const;

 private:
  std::uint64_t count_ = 0;
  double mean_x_ = 0;
  double mean_y_ = 0;
  double spread_x_ = 0;  // sum of (x - mean)^2
  double together_ = 0;  // sum of (x - mean x)(y - mean y)
};

}  // namespace ebb
