#include "streams/checked/fault_plan.h"

#include <array>
#include <cstddef>

#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

namespace {

struct Plan {
  std::uint64_t nth = 0;  // 0: no call fails
  FaultPlan::Extent extent = FaultPlan::Extent::kOnce;
  std::uint64_t calls = 0;
  std::uint64_t failures = 0;
};

// I/O threads of global objects ask until the process ends.
struct Plans {
  Plan& of(FaultPoint point) EBB_REQUIRES(mutex) { return plans.at(static_cast<std::size_t>(point)); }

  Mutex mutex;
  std::array<Plan, kFaultPoints> plans EBB_GUARDED_BY(mutex);
};

Plans& all() { return PerProcess<Plans>::here(); }

}  // namespace

void FaultPlan::arm(FaultPoint point, std::uint64_t nth, Extent extent) {
  Plans& plans = all();
  const MutexLock lock(plans.mutex);
  plans.of(point) = {.nth = nth, .extent = extent};
}

void FaultPlan::disarm() {
  Plans& plans = all();
  const MutexLock lock(plans.mutex);
  plans.plans = {};
}

std::uint64_t FaultPlan::calls(FaultPoint point) {
  Plans& plans = all();
  const MutexLock lock(plans.mutex);
  return plans.of(point).calls;
}

std::uint64_t FaultPlan::failures(FaultPoint point) {
  Plans& plans = all();
  const MutexLock lock(plans.mutex);
  return plans.of(point).failures;
}

namespace {

bool is_planned(FaultPoint point) noexcept {
  Plans& plans = all();
  const MutexLock lock(plans.mutex);
  Plan& plan = plans.of(point);
  ++plan.calls;
  const bool planned =
      plan.nth != 0 && (plan.extent == FaultPlan::Extent::kOnce ? plan.calls == plan.nth : plan.calls >= plan.nth);
  plan.failures += planned ? 1 : 0;
  return planned;
}

const bool kDecides = [] {
  fault_decider = &is_planned;
  return true;
}();

}  // namespace

}  // namespace ebb
