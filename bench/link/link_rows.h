#pragma once

#include <c10/core/Device.h>

#include "bench/common/result_rows.h"

namespace ebb {

// Adds a row for each size of copies, kind of host memory, direction, and whether the other direction is busy; then
// rows of ebb's own tier with blocks of 64 MiB, each as a ratio of the link's rate, measured in turn with the link's.
// `repetitions`: the number that count, after a first that does not. Throws what RawLink and PinnedTierRate throw.
void add_link_rows(c10::Device device, int repetitions, ResultRows& rows);

}  // namespace ebb
