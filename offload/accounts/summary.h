#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "offload/stats.h"
#include "policy/policy.h"

namespace ebb {

// The fewest steps after which the statistics mean more than chance. The first step learns the access order of
// backward.
inline constexpr std::uint64_t kEnoughSteps = 3;

// Returns the text of Offloader::summary.
[[nodiscard]] std::string summary(const Stats& stats);

// Returns a text of a few sentences for each setting that the user should change; no text before kEnoughSteps.
[[nodiscard]] std::vector<std::string> warnings(const Stats& stats, const std::vector<Matches>& matches);

}  // namespace ebb
