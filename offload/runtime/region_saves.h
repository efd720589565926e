#pragma once

#include <cstdint>

#include "offload/steps/storage_table.h"

namespace ebb {

// What a checkpointed region saves that a plan keeps.
struct RegionSaves {
  const std::uint32_t ordinal;  // the region's, as Candidate::ordinal
  StorageTable table;
};

}  // namespace ebb
