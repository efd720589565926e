#pragma once

#include <cstdint>
#include <optional>

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// What a step took that followed a plan.
struct StepCost {
  double ms = 0;                 // from its first save to the end of backward
  std::uint64_t peak_bytes = 0;  // of device memory, as in PlanReport::predicted
};

// A plan in figures.
struct PlanReport {
  std::uint64_t budget_bytes = 0;  // that it was made for; for goals without bytes, what their plan needs
  double all_kept_ms = 0;          // what the step would take with everything kept, as it was recorded
  StepRecord record;               // what the plan was made from
  LinkRates rates;
  bool metered =
      false;  // peaks are of the process's device memory; without Options::device_meter, of saved tensors only
  bool on_cpu = false;  // compute and copies share the cores
  Prediction predicted;
  bool fits = false;               // into the budget
  std::optional<StepCost> actual;  // of the second step that followed it, once that is over
};

}  // namespace ebb
