#pragma once

#include <cstdint>

#include "policy/budget.h"
#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Makes the plan for a goal, with at most `host_bytes` offloaded. The plan for Slowdown is found by bisection over the
// device's limit, which makes some ten plans. The plan for DeviceBytes decides about managed storages too, if the
// record has any; the other goals leave them as they were recorded. `fits` is false only where DeviceBytes cannot be
// met. The result is then the plan for LeastMemory, beside the least bound of managed storages, so its predicted peak
// is a limit that can be met.
//
// Note [How managed and saved storages share a device]
// For each of some bounds for the managed storages, from twice the largest one's bytes to all, managed_traffic() tells
// what their copies make the lanes carry in forward, in backward and between steps, and ManagedPace how long each phase
// takes, recipes included. The record's step is stretched to that, or to the time that a lane takes for the copies of
// managed and saved storages together, where that is longer. The step's other memory gets the difference between this
// bound and the recorded one, and saved storages get the lanes' rates less the parts that managed storages take, but at
// least half of the rates. For that step the saved storages are planned within the budget. Of all bounds the one is
// taken whose period is the shortest; within half a percent, the one that moves fewer bytes. Then bounds ever nearer to
// the best so far are tried. A bound is passed over if its pace alone is longer than a plan that fits.
//
// `near`: as for the planner's make_plan. It serves DeviceBytes without managed storages.
[[nodiscard]] Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes,
                             const LinkRates& rates, const std::vector<Decision>* near = nullptr);

// Predicts the step of a plan that was made from this record, with or without managed storages, at these rates.
// Threads: any.
[[nodiscard]] Prediction predict(const Plan& plan, const StepRecord& record, const LinkRates& rates);

}  // namespace ebb
