#pragma once

#include <cstdint>
#include <optional>

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// What a step took that followed a plan.
struct StepCost {
  double ms = 0;                 // from its first save to the end of backward
  std::uint64_t peak_bytes = 0;  // of the device's memory in use by the process; 0 where that is not known
};

// A plan in figures.
struct PlanReport {
  std::uint64_t budget_bytes = 0;  // that it was made for; for goals without bytes, what their plan needs
  double all_kept_ms = 0;          // what the step would take with everything kept, as it was recorded
  StepRecord record;               // what the plan was made from
  LinkRates rates;
  Prediction predicted;
  bool fits = false;               // into the budget
  std::optional<StepCost> actual;  // of the second step that followed it, once that is over
};

}  // namespace ebb
