#pragma once

#include <cstdint>
#include <vector>

#include "policy/step_record.h"

namespace ebb {

// A moment of a recorded step.
struct StepEvent {
  // Events at the same time are in this order, so a level that begins together with backward belongs to backward.
  enum class What : std::uint8_t { kBackward, kLevel, kSave, kIdle, kNeed, kRelease };

  double ms = 0;
  What what = What::kLevel;
  std::uint32_t index = 0;  // of the storage or the level

  friend bool operator<(const StepEvent& a, const StepEvent& b) {
    if (a.ms != b.ms) {
      return a.ms < b.ms;
    }
    return a.what != b.what ? a.what < b.what : a.index < b.index;
  }
};

// All events of a record, in order.
[[nodiscard]] std::vector<StepEvent> step_events(const StepRecord& record);

}  // namespace ebb
