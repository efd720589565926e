#pragma once

#include <optional>

#include <c10/core/Device.h>

namespace ebb {

// How many NUMA nodes the system shows; nullopt where it shows none, as some containers do.
std::optional<int> numa_node_count();

// The number of the node that is nearest to a GPU; nullopt where the system does not say. Throws c10::Error for what
// CUDA refuses.
std::optional<int> nearest_numa_node(c10::Device gpu);

}  // namespace ebb
