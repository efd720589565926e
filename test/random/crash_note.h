#pragma once

#include <cstdint>

namespace ebb::graphs {

// From now on a crash, or a graph that takes longer than two minutes, tells seed and graph before the process ends.
void install_crash_note(std::uint64_t seed);

// The graph that runs now.
void set_crash_note(std::uint64_t graph);

}  // namespace ebb::graphs
