#pragma once

#include <vector>

namespace ebb {

// The value below which this fraction (0 to 1) of the values lies, interpolated between the two nearest. Requires at
// least one value.
double percentile(std::vector<double> values, double fraction);

}  // namespace ebb
