#pragma once

#include <cstdint>
#include <vector>

#include "policy/plan.h"
#include "policy/step_record.h"

namespace ebb {

// Predicts the cost of a recorded step under given decisions.
//
// Note [The cost model]
// Compute runs in the recorded order. Two lanes copy one storage at a time, each beside compute and beside the other
// lane: copies out in the order of saving, copies in in the order of need. A storage that is kept or offloaded counts
// as held on the device from the time at which the forward pass has let go of the storage. An offloaded storage is held
// until its copy out is done. If the sources of copies out pass the stash's bound (StashSchedule), compute waits for
// the oldest copy. Such waits happen at saves and where backward begins, because there the runtime can make compute
// wait. Copies in start when backward begins and when backward first asks for a storage, because there the runtime can
// start copies, and only if the storage fits until its release (PrefetchSchedule). A run that makes several storages
// starts copies before it begins, and another recipe once it has run. A storage that is still on the device is not
// copied in. A dropped storage holds nothing until it is needed; its recipe then has the inputs brought back first, and
// takes its time. What only recipes ask for is there if one of them is to run. What else a run makes is held from then
// on if it was dropped, too, and is otherwise part of what the run takes besides. Every storage is released at the time
// in its record. Where waiting does not help, the device's limit is passed, and the predicted peak says so.
//
// Threads: `predict` may be called from any thread.
class Predictor {
 public:
  // `record` must outlive this object. `device_bytes`: the limit of all device memory.
  Predictor(const StepRecord& record, std::uint64_t device_bytes, const LinkRates& rates);

  // `decisions`: one for each storage. Takes time in proportion to storages, levels and recipe inputs. Deterministic.
  [[nodiscard]] Prediction predict(const std::vector<Decision>& decisions) const;

  // The events of the record.
  [[nodiscard]] const std::vector<StepEvent>& events() const { return events_; }

 private:
  class Run;

  const StepRecord& record_;
  const std::uint64_t device_bytes_;
  const LinkRates rates_;
  const std::vector<StepEvent> events_;
};

}  // namespace ebb
