#pragma once

#include <algorithm>
#include <cstdint>

namespace ebb {

// How fast copies are, each way. The runtime measures the rates on its machine, as bench/link does.
struct LinkRates {
  double out_bytes_per_ms = 55e6;
  double in_bytes_per_ms = 55e6;
  double ms_per_copy = 0.003;  // the fixed cost of a copy, besides its bytes
};

// The clock of one lane of the link, which runs one copy at a time.
class Lane {
 public:
  Lane(double bytes_per_ms, double ms_per_copy) : bytes_per_ms_(bytes_per_ms), ms_per_copy_(ms_per_copy) {}

  // Adds a copy that starts at `earliest_ms` at the earliest, and returns when the copy is done.
  double copy(double earliest_ms, std::uint64_t bytes) {
    const double takes_ms = static_cast<double>(bytes) / bytes_per_ms_ + ms_per_copy_;
    return free_ms_ = std::max(free_ms_, earliest_ms) + takes_ms;
  }

 private:
  double bytes_per_ms_;
  double ms_per_copy_;
  double free_ms_ = 0;
};

}  // namespace ebb
