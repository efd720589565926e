#include "policy/goal_planner.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "policy/managed_replay.h"
#include "policy/planner.h"
#include "policy/predict.h"

namespace ebb {
namespace {

// How many bounds are tried first, in equal ratios from the least to the largest.
constexpr int kBounds = 12;

// How often the bounds halfway to the best one's neighbours are tried then.
constexpr int kHalvings = 4;

// How often the saved storages of a bound are planned. What is left to them depends on how many are copied and
// recomputed, which the first time is not known.
constexpr int kRounds = 2;

// The part of make_plan's usual tries that is spent on each bound. The best one is planned with all of them.
constexpr double kEffort = 1.0 / 16;

// The least part of a lane that copies of saved storages get, because they take turns with copies of managed storages.
// The step's stretch has the time that both take together.
constexpr double kLeastPart = 0.5;

// Periods that differ by less than this part of the shorter one are equally good.
constexpr double kAlike = 0.005;

// What Belady's rule has of a bound: all that stays if that is enough for all storages. Otherwise what is fetched ahead
// takes its room half of the time.
ManagedRoom room_within(const StepRecord& record, std::uint64_t bound) {
  const std::uint64_t ahead = std::min(record.managed_ahead_bytes.value_or(fetched_ahead(bound)), bound);
  const bool is_enough = managed_traffic(record.managed, stays_of(bound)).bytes() == 0;
  return {.device_bytes = bound, .stay_bytes = stays_of(bound) - (is_enough ? 0 : ahead / 2), .ahead_bytes = ahead};
}

constexpr auto kForward = static_cast<std::size_t>(Phase::kForward);
constexpr auto kBackward = static_cast<std::size_t>(Phase::kBackward);
constexpr auto kBetween = static_cast<std::size_t>(Phase::kBetween);

// The plan of least memory, which may fit all the same.
Plan least_plan_within(const Limits& limits, const StepRecord& record, const LinkRates& rates) {
  Plan plan = make_least_plan(record, limits.host_bytes, rates);
  plan.fits = plan.predicted.peak_bytes <= limits.device_bytes;
  return plan;
}

// The storages that one bound leaves on the device and sends over the link, and how long that takes.
class Bound {
 public:
  // `more_bytes`: by how much other memory is more than recorded.
  Bound(const StepRecord& record, std::uint64_t device_bytes, std::int64_t more_bytes, const LinkRates& rates)
      : record_(&record), rates_(rates), pace_(record.managed, room_within(record, device_bytes)), pace_ms_(paced(0)) {
    share_ = {.device_bytes = device_bytes,
              .traffic = pace_.traffic(),
              .between_ms = pace_ms_[kBetween],
              .more_bytes = more_bytes};
    const ManagedTraffic::Lane& out = share_.traffic.out[kForward];
    const ManagedTraffic::Lane& in = share_.traffic.in[kBackward];
    out_ms_ = rates.out_ms(out.bytes, out.copies);
    in_ms_ = rates.in_ms(in.bytes, in.copies);
  }

  // The least that a period takes.
  [[nodiscard]] double least_ms() const { return pace_ms_[kForward] + pace_ms_[kBackward] + pace_ms_[kBetween]; }

  // The step, and the rates that are left to saved storages, where so many saved bytes are copied and recipes run so
  // long. `late_bytes`: of the copies whose time the step has.
  struct Left {
    StepRecord step;
    LinkRates rates;
  };
  [[nodiscard]] Left left(std::uint64_t offloaded, double recompute_ms, std::uint64_t late_bytes) const {
    const double forward_stretch = stretch(record_->backward_ms, forward_ms(late_bytes));
    const double paced_ms = paced(recompute_ms)[kBackward];
    const double backward_stretch = stretch(backward_compute_ms(), backward_ms(late_bytes, paced_ms) - recompute_ms);
    const auto later = [&](double ms) {
      const double in_forward = std::min(ms, record_->backward_ms);
      return in_forward * forward_stretch + (ms - in_forward) * backward_stretch;
    };
    LinkRates rates = rates_;
    rates.out_bytes_per_ms *= std::max(kLeastPart, 1 - out_ms_ / forward_ms(offloaded));
    rates.in_bytes_per_ms *= std::max(kLeastPart, 1 - in_ms_ / backward_ms(offloaded, paced_ms));
    return {changed(*record_, later, share_.more_bytes), rates};
  }

  [[nodiscard]] Left left(const ManagedShare& share) const {
    return left(share.offloaded_bytes, share.recompute_ms, share.offloaded_bytes);
  }

  // `effort`: as for make_plan.
  [[nodiscard]] Plan plan(const Limits& limits, double effort) const {
    // The first round does not know how much is copied. Its step has no time for copies beside a full lane, so that
    // recipes are preferred to copies that would be late.
    ManagedShare share = share_;
    Plan plan;
    for (int round = 0; round < kRounds; ++round) {
      const Left left = round == 0 ? this->left(all_bytes(), all_recipes_ms(), /*late_bytes=*/0) : this->left(share);
      plan = make_plan(left.step, limits, left.rates, effort);
      plan.managed = share;
      share.offloaded_bytes = plan.predicted.offloaded_bytes;
      share.recompute_ms = plan.predicted.recompute_ms;
    }
    return plan;
  }

  // A period under the plan, at least.
  [[nodiscard]] double period_ms(const Plan& plan) const {
    const std::uint64_t offloaded = plan.predicted.offloaded_bytes;
    const double paced_ms = paced(plan.predicted.recompute_ms)[kBackward];
    const double copied_ms = forward_ms(offloaded) + backward_ms(offloaded, paced_ms);
    return std::max(plan.predicted.step_ms, copied_ms) + share_.between_ms;
  }

 private:
  static double stretch(double compute_ms, double phase_ms) { return compute_ms > 0 ? phase_ms / compute_ms : 1; }

  [[nodiscard]] std::uint64_t all_bytes() const {
    std::uint64_t bytes = 0;
    for (const StorageRecord& storage : record_->storages) {
      bytes += storage.bytes;
    }
    return bytes;
  }
  [[nodiscard]] double all_recipes_ms() const {
    double ms = 0;
    std::vector<bool> seen(record_->storages.size());
    for (std::uint32_t i = 0; i < seen.size(); ++i) {
      if (record_->storages[i].recompute != Recompute::kNo && !seen[i]) {
        ms += record_->storages[i].recompute_ms;
        for_each_made_with(*record_, i, [&seen](std::uint32_t made) { seen[made] = true; });
      }
    }
    return ms;
  }
  [[nodiscard]] double backward_compute_ms() const { return record_->end_ms - record_->backward_ms; }

  // How long each phase takes beside managed storages, if recipes run so long.
  [[nodiscard]] EachPhase<double> paced(double recompute_ms) const {
    return pace_.phases_ms({record_->backward_ms, backward_compute_ms() + recompute_ms, 0}, rates_);
  }

  // How long a phase takes if so many saved bytes are copied, too. `paced_ms`: as paced() has it for backward.
  [[nodiscard]] double forward_ms(std::uint64_t offloaded) const {
    return std::max(pace_ms_[kForward], out_ms_ + rates_.out_ms(offloaded, 0));
  }
  [[nodiscard]] double backward_ms(std::uint64_t offloaded, double paced_ms) const {
    return std::max(paced_ms, in_ms_ + rates_.in_ms(offloaded, 0));
  }

  const StepRecord* record_;
  LinkRates rates_;
  ManagedPace pace_;
  EachPhase<double> pace_ms_;  // without recipes
  double out_ms_ = 0;          // of managed storages' copies in forward
  double in_ms_ = 0;           // and in backward
  ManagedShare share_;
};

class JointSearch {
 public:
  JointSearch(const StepRecord& record, const Limits& limits, const LinkRates& rates)
      : record_(record),
        limits_(limits),
        rates_(rates),
        peak_of_all_(managed_traffic(record.managed, kUnlimited).peak_bytes),
        largest_operation_in_step_(std::max(largest_operation(record.managed, Phase::kForward),
                                            largest_operation(record.managed, Phase::kBackward))) {
    const std::uint64_t enough = bound_for(*std::ranges::max_element(peak_of_all_));
    least_ = std::min(2 * std::ranges::max_element(record.managed, {}, &ManagedUse::bytes)->bytes, enough);
    most_ = std::max(least_, std::min(enough, limits.device_bytes));
  }

  Plan run() {
    try_all(in_equal_ratios());
    try_all({record_.managed_device_bytes});
    if (!best_) {
      return least_memory();
    }
    for (int i = 0; i < kHalvings; ++i) {
      try_all(around_best());
    }
    const Bound bound = within(best_->managed->device_bytes);
    Plan plan = bound.plan(limits_, /*effort=*/1);
    return plan.fits && bound.period_ms(plan) < bound.period_ms(*best_) ? std::move(plan) : *std::move(best_);
  }

 private:
  // The most bytes of managed storages on the device in a step within a bound. What is fetched ahead fills the bound,
  // and an operation gets its storages whatever the bound is.
  [[nodiscard]] std::uint64_t peak_in_step(std::uint64_t bound) const {
    const std::uint64_t all = std::max(peak_of_all_[kForward], peak_of_all_[kBackward]);
    return std::min(all, std::max(bound, largest_operation_in_step_));
  }

  [[nodiscard]] Bound within(std::uint64_t bound) const {
    const std::uint64_t recorded = record_.managed_device_bytes == 0 ? 0 : peak_in_step(record_.managed_device_bytes);
    return {record_, bound, static_cast<std::int64_t>(peak_in_step(bound)) - static_cast<std::int64_t>(recorded),
            rates_};
  }

  [[nodiscard]] std::vector<std::uint64_t> in_equal_ratios() const {
    std::vector<std::uint64_t> bounds;
    const double ratio = static_cast<double>(most_) / static_cast<double>(std::max<std::uint64_t>(least_, 1));
    for (int i = 0; i < kBounds - 1; ++i) {
      bounds.push_back(static_cast<std::uint64_t>(static_cast<double>(least_) * std::pow(ratio, i / (kBounds - 1.0))));
    }
    bounds.push_back(most_);
    return bounds;
  }

  // The bounds in the middle between the best one and its neighbours of those that were tried.
  [[nodiscard]] std::vector<std::uint64_t> around_best() const {
    const std::uint64_t best = best_->managed->device_bytes;
    const auto here = seen_.find(best);
    std::vector<std::uint64_t> bounds;
    if (here != seen_.begin()) {
      bounds.push_back(best - (best - *std::prev(here)) / 2);
    }
    if (std::next(here) != seen_.end()) {
      bounds.push_back(best + (*std::next(here) - best) / 2);
    }
    return bounds;
  }

  // Tries bounds, those of the least pace first.
  void try_all(const std::vector<std::uint64_t>& bounds) {
    std::vector<Bound> soonest;
    for (const std::uint64_t bound : bounds) {
      if (bound > 0 && seen_.insert(bound).second) {
        soonest.push_back(within(bound));
      }
    }
    std::ranges::stable_sort(soonest, {}, &Bound::least_ms);
    for (const Bound& bound : soonest) {
      if (best_ && bound.least_ms() > best_ms_ * (1 + kAlike)) {
        return;
      }
      try_bound(bound);
    }
  }

  void try_bound(const Bound& bound) {
    Plan plan = bound.plan(limits_, kEffort);
    if (!plan.fits) {
      return;
    }
    const double ms = bound.period_ms(plan);
    const bool is_alike = best_ && std::abs(ms - best_ms_) <= kAlike * std::min(ms, best_ms_);
    if (!best_ || (is_alike ? moved(plan) < moved(*best_) : ms < best_ms_)) {
      best_ms_ = is_alike ? std::min(ms, best_ms_) : ms;  // so that small losses do not add up
      best_ = std::move(plan);
    }
  }

  static std::uint64_t moved(const Plan& plan) {
    return plan.managed->traffic.bytes() + 2 * plan.predicted.offloaded_bytes;
  }

  // The plan of least memory beside the least bound.
  [[nodiscard]] Plan least_memory() const {
    const Bound bound = within(least_);
    const Plan tried = bound.plan({.device_bytes = 0, .host_bytes = limits_.host_bytes}, kEffort);
    const auto [step, rates] = bound.left(*tried.managed);
    Plan plan = least_plan_within(limits_, step, rates);
    plan.managed = tried.managed;
    return plan;
  }

  const StepRecord& record_;
  const Limits limits_;
  const LinkRates rates_;
  const EachPhase<std::uint64_t> peak_of_all_;  // of managed storages, if all that have been there stay
  const std::uint64_t largest_operation_in_step_;
  std::uint64_t least_ = 0;  // the least and the largest bound
  std::uint64_t most_ = 0;
  std::set<std::uint64_t> seen_;  // bounds that were tried, or whose pace is too long
  std::optional<Plan> best_;
  double best_ms_ = 0;
};

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

}  // namespace

Prediction predict(const Plan& plan, const StepRecord& record, const LinkRates& rates) {
  if (!plan.managed) {
    return Predictor(record, plan.device_bytes, rates).predict(plan.decisions);
  }
  const auto left = Bound(record, plan.managed->device_bytes, plan.managed->more_bytes, rates).left(*plan.managed);
  return Predictor(left.step, plan.device_bytes, left.rates).predict(plan.decisions);
}

Plan make_plan(const StepRecord& record, const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates,
               const std::vector<Decision>* near) {
  if (const auto* const slowdown = std::get_if<Slowdown>(&goal)) {
    return plan_within(*slowdown, record, host_bytes, rates);
  }
  const auto* const budget = std::get_if<DeviceBytes>(&goal);
  if (budget == nullptr) {
    return make_least_plan(record, host_bytes, rates);
  }
  const Limits limits{.device_bytes = budget->bytes, .host_bytes = host_bytes};
  if (!record.managed.empty()) {
    return JointSearch(record, limits, rates).run();
  }
  Plan plan = make_plan(record, limits, rates, /*effort=*/1, near);
  return plan.fits ? plan : least_plan_within(limits, record, rates);
}

}  // namespace ebb
