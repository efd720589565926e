#include "policy/goal_planner.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "policy/joint_planner.h"
#include "policy/planner.h"

namespace ebb {
namespace {

Plan plan_within(const DeviceBytes& goal, const StepRecord& record, std::uint64_t host_bytes, const LinkRates& rates) {
  const Limits limits{.device_bytes = goal.bytes, .host_bytes = host_bytes};
  if (!record.managed.empty()) {
    return make_joint_plan(record, limits, rates);
  }
  Plan plan = make_plan(record, limits, rates);
  if (!plan.fits) {
    plan = make_least_plan(record, host_bytes, rates);
    plan.fits = plan.predicted.peak_bytes <= goal.bytes;
  }
  return plan;
}

Plan plan_within(const Slowdown& goal, const StepRecord& record, std::uint64_t host_bytes, const LinkRates& rates) {
  const auto within = [&](std::uint64_t device_bytes) {
    return make_plan(record, Limits{.device_bytes = device_bytes, .host_bytes = host_bytes}, rates);
  };
  Plan best = within(kUnlimited);
  const double most_ms = best.predicted.step_ms * (1 + goal.fraction);
  std::uint64_t enough = best.predicted.peak_bytes;
  std::uint64_t too_little = make_least_plan(record, host_bytes, rates).predicted.peak_bytes;
  constexpr std::uint64_t kParts = 1000;  // the result is exact to this part of the way from `too_little` to `enough`
  const std::uint64_t exact = std::max<std::uint64_t>((enough - std::min(enough, too_little)) / kParts, 1);
  while (too_little < enough && enough - too_little > exact) {
    const std::uint64_t middle = too_little + (enough - too_little) / 2;
    Plan plan = within(middle);
    if (plan.fits && plan.predicted.step_ms <= most_ms) {
      enough = middle;
      best = std::move(plan);
    } else {
      too_little = middle;
    }
  }
  return best;
}

Plan plan_within(const LeastMemory& /*goal*/, const StepRecord& record, std::uint64_t host_bytes,
                 const LinkRates& rates) {
  return make_least_plan(record, host_bytes, rates);
}

}  // namespace

Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates) {
  return std::visit([&](const auto& each) { return plan_within(each, record, host_bytes, rates); }, goal);
}

}  // namespace ebb
