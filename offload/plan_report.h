#pragma once

#include <cstdint>
#include <optional>

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// A plan in figures.
struct PlanReport {
  std::uint64_t budget_bytes = 0;  // for which the plan was made; for a goal without bytes, what the plan needs
  double all_kept_ms = 0;          // the time of the recorded step with everything kept
  StepRecord record;               // from which the plan was made
  LinkRates rates;
  bool metered = false;  // true: peaks are of the process's device memory; false: of saved tensors only
  bool on_cpu = false;   // compute and copies share the cores
  Prediction predicted;
  bool fits = false;                    // whether the plan fits into the budget
  std::optional<ManagedShare> managed;  // where the plan decides about managed storages
  std::optional<StepCost> actual;       // of the second step that followed the plan, once that step is over
};

}  // namespace ebb
