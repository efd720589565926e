#include "test/checked/fault_plan.h"

#include <array>
#include <atomic>
#include <cstddef>

namespace ebb {

namespace {

struct Plan {
  void set(std::uint64_t to_fail, FaultPlan::Extent for_calls) {
    nth = 0;
    extent = for_calls;
    calls = failures = 0;
    nth = to_fail;
  }

  std::atomic<std::uint64_t> nth{0};  // 0: no call fails
  std::atomic<FaultPlan::Extent> extent{FaultPlan::Extent::kOnce};
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> failures{0};
};

// Constant-initialised and never destroyed: I/O threads of global objects ask until the process ends. Without a lock: a
// forked child asks, too.
constinit std::array<Plan, kFaultPoints> plans;

Plan& plan_of(FaultPoint point) { return plans.at(static_cast<std::size_t>(point)); }

}  // namespace

bool fails(FaultPoint point) noexcept {
  Plan& plan = plan_of(point);
  const std::uint64_t call = ++plan.calls;
  const std::uint64_t nth = plan.nth;
  const bool planned = nth != 0 && (plan.extent == FaultPlan::Extent::kOnce ? call == nth : call >= nth);
  plan.failures += planned ? 1 : 0;
  return planned;
}

void FaultPlan::arm(FaultPoint point, std::uint64_t nth, Extent extent) { plan_of(point).set(nth, extent); }

void FaultPlan::disarm() {
  for (Plan& plan : plans) {
    plan.set(0, Extent::kOnce);
  }
}

std::uint64_t FaultPlan::calls(FaultPoint point) { return plan_of(point).calls; }

std::uint64_t FaultPlan::failures(FaultPoint point) { return plan_of(point).failures; }

}  // namespace ebb
