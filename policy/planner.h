#pragma once

#include "policy/budget.h"
#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Decides for each storage of a recorded step whether to keep, offload or recompute it, so that the predicted step
// (Note [The cost model] in predict.h) is as short as possible within `limits`. Deterministic.
//
// Note [How a plan is found]
// What costs least per byte is recomputed first, the first needed first among equals: what hides best behind compute is
// the early storages' copies. For a number of recomputed storages, the earliest saved of the others are offloaded until
// the rest fits: that number is found by bisection, and the number of recomputed ones by looking ever more closely
// around the best so far, both to a 128th of all storages. A number of recomputed ones is passed over if they alone
// take longer than a plan that fits; or if neither the fewest others that could do, offloaded, nor all of them fit:
// then it is taken that no number between does. (In 1350 random steps of 50 to 199 storages near the least memory,
// pairs of the two numbers fit in 413; 2 of these plans were lost.) Then single decisions are changed, then two
// together, and so on, for as many tries as the size allows. test/policy/planner_test.cc compares with all possible
// plans of small steps, planner_long_step_test.cc with pairs of two such numbers; bench/planning times it.
//
// Nothing is moved or recomputed if all fits as it is. If no plan is found that fits, the result is the one with the
// least memory over the limits, with `fits` false.
[[nodiscard]] Plan make_plan(const StepRecord& record, const Limits& limits, const LinkRates& rates);

// The plan for a goal, with at most `host_bytes` offloaded. Slowdown is found by bisection over the device's limit:
// some ten plans. `fits` is false only where DeviceBytes cannot be met: the result is then that of LeastMemory, so its
// predicted peak is a limit that can be.
[[nodiscard]] Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes,
                             const LinkRates& rates);

}  // namespace ebb
