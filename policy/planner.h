#pragma once

#include <cstdint>

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Decides for each storage of a recorded step whether to keep, offload or recompute it, so that the predicted step
// (Note [The cost model] in predict.h) is as short as possible within `limits`. Deterministic.
//
// Note [How a plan is found]
// The storages that cost least per byte are recomputed first, and among equally cheap storages the first needed: the
// copies of early saved storages, which are needed last, hide best behind compute. What one run makes together counts
// as one storage there. For each number of recomputed storages, the earliest saved of the others are offloaded until
// the step fits. The number of offloaded storages is found by bisection, and the number of recomputed storages by
// looking ever more closely around the best so far; both are exact to a 128th of all storages. A number of recomputed
// storages is passed over if the recomputed storages alone take longer than a plan that fits. The number is also passed
// over if the step fits neither with the fewest offloaded that could suffice nor with all others offloaded; the search
// then assumes that no number between fits. (In 1350 random steps of 50 to 199 storages near the least memory, pairs of
// the two numbers fit in 413; the assumption lost 2 of these plans.) Then the decisions about all that one run makes
// are changed, and single decisions, then two together, and so on, for as many tries as the number of storages allows.
// Decisions about storages that are alike are changed together: what is at one place of a block that is repeated. A
// plan that does not fit is improved so first, and without that once more. If neither fits, the search begins again
// from the plan of the least memory.
// test/policy/planner_test.cc compares with all possible plans of small steps, planner_long_step_test.cc with all pairs
// of the two numbers, and bench/planning times the search.
//
// Nothing is moved or recomputed if the step fits with everything kept. If no plan is found that fits, the result is
// the plan that passes the limits by least, with `fits` false.
//
// `effort`: the part of the usual tries to spend, in (0, 1]. `near`: null, or the decisions about a step that differs
// in its sizes alone and takes a little more. A search that begins there, and fits, is a quarter as long.
[[nodiscard]] Plan make_plan(const StepRecord& record, const Limits& limits, const LinkRates& rates, double effort = 1,
                             const std::vector<Decision>* near = nullptr);

// Makes the plan of the least memory and, of such plans, a fast one, with at most `host_bytes` offloaded. The plan
// fits.
[[nodiscard]] Plan make_least_plan(const StepRecord& record, std::uint64_t host_bytes, const LinkRates& rates);

}  // namespace ebb
