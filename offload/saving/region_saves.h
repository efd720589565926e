#pragma once

#include <cstdint>

#include "offload/steps/storage_table.h"

namespace ebb {

// The saves of one checkpointed region that a plan keeps.
struct RegionSaves {
  const std::uint32_t ordinal;  // the region's, as Candidate::ordinal
  StorageTable table;
};

}  // namespace ebb
