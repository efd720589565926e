#pragma once

#include "policy/link.h"
#include "streams/base/tier.h"

namespace ebb {

// Measures how fast a tier's copies are, by copying blocks of some MiB out and in a few times. The calling thread waits
// for the copies. Returns the default figures of LinkRates where the tier or the device has no room for the blocks.
[[nodiscard]] LinkRates measure_link(Tier& tier);

}  // namespace ebb
