#pragma once

#include <algorithm>
#include <cstdint>

namespace ebb {

// How fast copies are, each way. The runtime measures the rates on its machine, as bench/link does.
struct LinkRates {
  double out_bytes_per_ms = 55e6;
  double in_bytes_per_ms = 55e6;
  double ms_per_copy = 0.003;  // the fixed cost of a copy, besides its bytes

  // How long a lane takes for so many bytes in so many copies.
  [[nodiscard]] double out_ms(std::uint64_t bytes, std::uint64_t copies) const {
    return static_cast<double>(bytes) / out_bytes_per_ms + static_cast<double>(copies) * ms_per_copy;
  }
  [[nodiscard]] double in_ms(std::uint64_t bytes, std::uint64_t copies) const {
    return static_cast<double>(bytes) / in_bytes_per_ms + static_cast<double>(copies) * ms_per_copy;
  }
};

// The clocks of the link's two lanes, each of which runs one copy at a time. A copy starts at `earliest_ms` at the
// earliest; the result is when the copy is done.
class Link {
 public:
  explicit Link(const LinkRates& rates) : rates_(rates) {}

  double copy_out(double earliest_ms, std::uint64_t bytes) {
    return out_free_ms_ = std::max(out_free_ms_, earliest_ms) + rates_.out_ms(bytes, 1);
  }
  double copy_in(double earliest_ms, std::uint64_t bytes) {
    return in_free_ms_ = std::max(in_free_ms_, earliest_ms) + rates_.in_ms(bytes, 1);
  }

 private:
  LinkRates rates_;
  double out_free_ms_ = 0;
  double in_free_ms_ = 0;
};

}  // namespace ebb
