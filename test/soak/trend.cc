#include "test/soak/trend.h"

namespace ebb {

// Welford's updates: sums of squares of byte counts would lose the differences that matter.
void Trend::add(double x, double y) {
  ++count_;
  const double from_mean_x = x - mean_x_;
  mean_x_ += from_mean_x / static_cast<double>(count_);
  mean_y_ += (y - mean_y_) / static_cast<double>(count_);
  spread_x_ += from_mean_x * (x - mean_x_);
  together_ += from_mean_x * (y - mean_y_);
}

double Trend::slope() const { return spread_x_ > 0 ? together_ / spread_x_ : 0; }

}  // namespace ebb
