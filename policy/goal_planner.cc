#include <algorithm>
#include <utility>
#include <variant>

#include "policy/joint_planner.h"
#include "policy/planner.h"

namespace ebb {
namespace {

class GoalPlanner {
 public:
  GoalPlanner(const StepRecord& record, std::uint64_t host_bytes, const LinkRates& rates)
      : record_(record), host_bytes_(host_bytes), rates_(rates) {}

  Plan operator()(const DeviceBytes& goal) const {
    if (!record_.managed.empty()) {
      return make_joint_plan(record_, goal, host_bytes_, rates_);
    }
    Plan plan = within(goal.bytes);
    if (!plan.fits) {
      plan = (*this)(LeastMemory{});
      plan.fits = plan.predicted.peak_bytes <= goal.bytes;
    }
    return plan;
  }

  // A limit of 0 makes compute wait for every copy, and no plan takes less memory. A faster plan with the same peak is
  // better.
  Plan operator()(const LeastMemory& /*goal*/) const {
    Plan least = within(0);
    Plan plan = within(least.predicted.peak_bytes);
    if (plan.fits) {
      return plan;
    }
    least.fits = true;
    return least;
  }

  Plan operator()(const Slowdown& goal) const {
    Plan best = within(kUnlimited);
    const double most_ms = best.predicted.step_ms * (1 + goal.fraction);
    std::uint64_t enough = best.predicted.peak_bytes;
    std::uint64_t too_little = (*this)(LeastMemory{}).predicted.peak_bytes;
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

 private:
  [[nodiscard]] Plan within(std::uint64_t device_bytes) const {
    return make_plan(record_, {.device_bytes = device_bytes, .host_bytes = host_bytes_}, rates_);
  }

  const StepRecord& record_;
  const std::uint64_t host_bytes_;
  const LinkRates rates_;
};

}  // namespace

Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates) {
  return std::visit(GoalPlanner(record, host_bytes, rates), goal);
}

}  // namespace ebb
