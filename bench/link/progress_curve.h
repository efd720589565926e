#pragma once

#include <utility>
#include <vector>

namespace ebb {

// At this time, in milliseconds of some clock, so many bytes had been copied.
struct Progress {
  double ms = 0;
  double bytes = 0;
};

// The progress of one direction's copies: in the order of time, from the start on, when no byte had been copied.
using ProgressCurve = std::vector<Progress>;

// GB/s (1e9 bytes) from the first point to the last. Requires two points of different times.
double rate_gb_per_s(const ProgressCurve& curve);

// GB/s of each of two curves on one clock, over the time in which both ran: from the later start until the curve's own
// last point before either was done, because the other then has the link to itself. A curve without such a point counts
// as having gone evenly to its next. Throws std::runtime_error if they never ran at once.
std::pair<double, double> rates_together(const ProgressCurve& a, const ProgressCurve& b);

}  // namespace ebb
