#pragma once

#include <cstdint>

#include "policy/budget.h"
#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Makes the plan for a goal, with at most `host_bytes` offloaded. The plan for Slowdown is found by bisection over the
// device's limit, which makes some ten plans. The plan for DeviceBytes decides about managed storages too, if the
// record has any (joint_planner.h); the other goals leave them as they were recorded. `fits` is false only where
// DeviceBytes cannot be met. The result is then the plan for LeastMemory, so its predicted peak is a limit that can be
// met.
[[nodiscard]] Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes,
                             const LinkRates& rates);

}  // namespace ebb
