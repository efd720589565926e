#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "offload/stats.h"
#include "policy/policy.h"

namespace ebb {

// The fewest steps after which what they say is more than chance. The first one learns the order of backward.
inline constexpr std::uint64_t kEnoughSteps = 3;

// As Offloader::summary.
[[nodiscard]] std::string summary(const Stats& stats);

// One sentence or two for each thing that the user should mend; none before kEnoughSteps.
[[nodiscard]] std::vector<std::string> warnings(const Stats& stats, const std::vector<Matches>& matches);

}  // namespace ebb
