#include "streams/checked/fault_plan.h"

#include <array>
#include <cstddef>

#include "streams/base/mutex.h"

namespace ebb {

namespace {

struct Plan {
  std::uint64_t nth = 0;  // 0: no call fails
  FaultPlan::Extent extent = FaultPlan::Extent::kOnce;
  std::uint64_t calls = 0;
  std::uint64_t failures = 0;
};

// Constant-initialised and never destroyed: I/O threads of global objects ask until the process ends.
constinit Mutex mutex;
constinit std::array<Plan, kFaultPoints> plans EBB_GUARDED_BY(mutex);

Plan& plan_of(FaultPoint point) EBB_REQUIRES(mutex) { return plans.at(static_cast<std::size_t>(point)); }

}  // namespace

void FaultPlan::arm(FaultPoint point, std::uint64_t nth, Extent extent) {
  const MutexLock lock(mutex);
  plan_of(point) = {.nth = nth, .extent = extent};
}

void FaultPlan::disarm() {
  const MutexLock lock(mutex);
  plans = {};
}

std::uint64_t FaultPlan::calls(FaultPoint point) {
  const MutexLock lock(mutex);
  return plan_of(point).calls;
}

std::uint64_t FaultPlan::failures(FaultPoint point) {
  const MutexLock lock(mutex);
  return plan_of(point).failures;
}

namespace {

bool is_planned(FaultPoint point) noexcept {
  const MutexLock lock(mutex);
  Plan& plan = plan_of(point);
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
