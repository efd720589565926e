#pragma once

#include <cstdint>

namespace ebb::graphs {

// How a program's leaves are managed.
struct ManagedLeaves {
  std::uint64_t device_bytes = 0;  // the most of them on the device
  bool by_plan = false;            // the plan for a budget in bytes decides in place of device_bytes
  bool operator==(const ManagedLeaves&) const = default;
};

}  // namespace ebb::graphs
