#pragma once

#include <string>

#include "offload/plan_report.h"
#include "policy/budget.h"
#include "policy/planned_policy.h"

namespace ebb {

// A plan as a table: by operation and decision the storages, their bytes, why, and the predicted cost; then predicted
// and actual peak and time. `known.plan` must not be null.
[[nodiscard]] std::string explain_plan(const PlannedPolicy::Known& known, const Goal& goal, const PlanReport& report);

}  // namespace ebb
