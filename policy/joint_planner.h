#pragma once

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Makes the plan for a step whose record has managed storages: decides together how many bytes these may have on the
// device, and what becomes of each saved storage, so that step and link are done soonest within `limits`.
//
// Note [How managed and saved storages share a device]
// For each of some bounds for the managed storages, from twice the largest one's bytes to all, managed_traffic() tells
// what their copies make the lanes carry in forward, in backward and between steps, and ManagedPace how long each phase
// takes, recipes included. The record's step is stretched to that, or to the time that a lane takes for the copies of
// managed and saved storages together, where that is longer. The step's other memory gets the difference between this
// bound and the recorded one, and saved storages get the lanes' rates less the parts that managed storages take, but at
// least half of the rates. For that step make_plan() plans the saved storages. Of all bounds the one is taken whose
// period is the shortest; within half a percent, the one that moves fewer bytes. Then bounds ever nearer to the best so
// far are tried. A bound is passed over if its pace alone is longer than a plan that fits.
//
// If no bound fits, the result is the plan of least memory beside the least bound, so its predicted peak is a limit
// that can be met; `fits` is false. Threads: any, as with predict().
[[nodiscard]] Plan make_joint_plan(const StepRecord& record, const Limits& limits, const LinkRates& rates);

// Predicts the step of a plan that was made from this record, with or without managed storages, at these rates.
[[nodiscard]] Prediction predict(const Plan& plan, const StepRecord& record, const LinkRates& rates);

}  // namespace ebb
