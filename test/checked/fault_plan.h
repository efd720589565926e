#pragma once

#include <cstdint>

#include "streams/base/fault_point.h"

namespace ebb {

// Which calls are to fail: one plan for the whole process, because any thread may make the calls.
// Only for tests. Every call of a FaultPoint is counted where this file is linked.
//
// Threads: every member from any thread.
class FaultPlan {
 public:
  enum class Extent : std::uint8_t {
    kOnce,        // the n-th call only
    kFromThenOn,  // the n-th call and all later ones
  };

  FaultPlan() = delete;

  // The `nth` call from now on (1: the next one) of `point` fails. Replaces the plan for this point, whose counts start
  // at zero again; other points keep theirs. Requires nth >= 1.
  static void arm(FaultPoint point, std::uint64_t nth, Extent extent);

  // Nothing fails any more, and every count is zero.
  static void disarm();

  // How often the point was asked since it was armed or all were disarmed, and how many of these calls failed.
  [[nodiscard]] static std::uint64_t calls(FaultPoint point);
  [[nodiscard]] static std::uint64_t failures(FaultPoint point);
};

// A plan for one point while this lives.
class PlannedFault {
 public:
  PlannedFault(FaultPoint point, std::uint64_t nth, FaultPlan::Extent extent) { FaultPlan::arm(point, nth, extent); }
  PlannedFault(const PlannedFault&) = delete;
  PlannedFault& operator=(const PlannedFault&) = delete;
  ~PlannedFault() { FaultPlan::disarm(); }
};

}  // namespace ebb
