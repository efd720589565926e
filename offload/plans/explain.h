#pragma once

#include <string>

#include "offload/plan_report.h"
#include "policy/budget.h"
#include "policy/step_planner.h"

namespace ebb {

// Returns a plan as a table. A row for each operation and decision has the number of storages, their bytes, the reason,
// and the predicted cost; the predicted and the actual peak and time follow. `known.plan` must not be null.
[[nodiscard]] std::string explain_plan(const StepPlanner::Known& known, const Goal& goal, const PlanReport& report);

}  // namespace ebb
