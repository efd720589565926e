#pragma once

#include "offload/gauge.h"
#include "offload/timeline.h"

namespace ebb {

// What ebb holds in device memory, now and over time. Shared by all that is counted, which may outlive the Core: a
// tensor that was fetched can be saved again and then lies in the Core's own stash.
struct DeviceAccount {
  explicit DeviceAccount(bool record_timeline) : held(record_timeline ? &timeline : nullptr) {}

  Timeline timeline;
  Gauge held;
};

}  // namespace ebb
