#pragma once

#include <cstdint>

namespace ebb {

// One point of the timeline: what ebb holds in device memory after a save, a use or a release.
struct TimelineSample {
  double ms = 0;                      // since the timeline was last taken
  std::uint64_t saved_on_device = 0;  // bytes
  bool backward = false;              // taken inside autograd's engine
};

}  // namespace ebb
