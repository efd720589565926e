#pragma once

#include <vector>

#include "policy/plan.h"
#include "policy/step_events.h"
#include "policy/step_record.h"

namespace ebb {

// Predicts what a recorded step costs under decisions.
//
// Note [The cost model]
// Compute runs in the recorded order. Two lanes copy one storage at a time, each beside compute and beside the other:
// out in the order of saving, in in the order of need. A storage that is kept or offloaded holds device memory from
// when the forward pass has let go of it, and one that is offloaded until its copy out is done. If the sources of
// copies out would take more than their room (StashSchedule), compute waits for the oldest; that happens at saves and
// where backward begins, because there the runtime can make it wait. Copies in start when backward begins and when it
// first asks for a storage, if there is room for them until their release (PrefetchSchedule), because there the runtime
// can start them; a storage that is still on the device is not copied. What is dropped holds nothing until it is
// needed; its recipe then has its inputs brought back first, and takes its time. All is released when its record says
// so. Where waiting does not help, the limit is passed, and the peak says so.
//
// Threads: `predict` may be called from any thread.
class Predictor {
 public:
  // `record` must outlive this.
  Predictor(const StepRecord& record, const Limits& limits, const LinkRates& rates);

  // `decisions`: one for each storage. Takes time in proportion to storages, levels and recipe inputs. Deterministic.
  [[nodiscard]] Prediction predict(const std::vector<Decision>& decisions) const;

  // Of the record.
  [[nodiscard]] const std::vector<StepEvent>& events() const { return events_; }

 private:
  class Run;

  const StepRecord& record_;
  const Limits limits_;
  const LinkRates rates_;
  const std::vector<StepEvent> events_;
};

}  // namespace ebb
