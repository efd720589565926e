#include "policy/step_planner.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "policy/goal_planner.h"
#include "policy/joint_planner.h"

namespace ebb {
namespace {

constexpr std::size_t kMaxOpenRecords = 4;

// How many of the next steps may be recorded to find one that is like a step that has strayed.
constexpr int kPatience = 8;

bool planned(const StepPlanner::Known& known) { return known.plan != nullptr; }

void scale_times(StepRecord& record, double factor) {
  for (StorageRecord& storage : record.storages) {
    for (double* const ms :
         {&storage.saved_ms, &storage.idle_ms, &storage.needed_ms, &storage.released_ms, &storage.recompute_ms}) {
      *ms *= factor;
    }
  }
  for (StepRecord::Level& level : record.other) {
    level.ms *= factor;
  }
  record.backward_ms *= factor;
  record.end_ms *= factor;
}

void add_other_memory(StepRecord& record, std::uint64_t bytes) {
  for (StorageRecord& storage : record.storages) {
    storage.other_bytes += bytes;
  }
  for (StepRecord::Level& level : record.other) {
    level.bytes += bytes;
  }
}

LinkRates slower(LinkRates rates, double slowdown) {
  rates.out_bytes_per_ms /= slowdown;
  rates.in_bytes_per_ms /= slowdown;
  rates.ms_per_copy *= slowdown;
  return rates;
}

// The decision that takes the least memory.
Decision safe(const Candidate& candidate) {
  return candidate.recompute == Recompute::kNo ? Decision::kOffload : Decision::kRecompute;
}

}  // namespace

StepPlanner::StepPlanner(const Goal& goal, std::uint64_t host_bytes, const LinkRates& rates, std::uint64_t least_bytes)
    : goal_(goal), first_host_bytes_(host_bytes), rates_(rates), least_bytes_(least_bytes) {}

void StepPlanner::begin_step() {
  if (recording_ && learned_ != step_) {
    remember_signature();
  }
  if (moves_ && !recording_ && (strayed_ || last_plan() == nullptr)) {
    leaves_alone_ = false;
  }
  if (strayed_ && moves_) {
    wanted_ = seen_;
    patience_ = kPatience;
  }
  keep_to_host_limit();
  const auto has_plan = [&](const Signature& signature) {
    return std::ranges::any_of(known_, [&](const Known& each) { return planned(each) && each.signature == signature; });
  };
  recording_ = !too_long_ && !leaves_alone_ && (last_plan() == nullptr || (patience_ > 0 && !has_plan(wanted_)));
  too_long_ = false;
  patience_ = std::max(patience_ - 1, 0);
  forget_step();
  ++step_;
}

// The forward pass was evaluation, or its graph was dropped: no record of the step will come.
void StepPlanner::drop_step() {
  recording_ = false;
  forget_step();
}

void StepPlanner::forget_step() {
  strayed_ = false;
  following_ = nullptr;
  moves_ = false;
  kept_ = 0;
  seen_.clear();
}

StepPlanner::Answer StepPlanner::decide(const Candidate& candidate) {
  const Decision decision = decision_about(candidate);
  return {decision, following_ == nullptr ? nullptr : following_->plan};
}

Decision StepPlanner::decision_about(const Candidate& candidate) {
  if (candidate.bytes < least_bytes_ && !candidate.region) {
    return Decision::kKeep;
  }
  if (seen_.size() == kMostStorages) {
    too_long_ = true;
    met_long_step_ = true;
    recording_ = false;
    moves_ = true;
    return safe(candidate);
  }
  seen_.push_back({candidate.bytes, std::string(candidate.operation)});
  strayed_ = strayed_ || (!recording_ && !choose_plan());
  const bool stays =
      leaves_alone_ && !recording_ && !moves_ && !candidate.region && fits_whole(kept_ + candidate.bytes);
  Decision decision = stays ? Decision::kKeep : safe(candidate);
  if (following_ != nullptr) {
    const Decision planned = following_->plan->decisions[seen_.size() - 1];
    decision = planned == Decision::kRecompute ? safe(candidate) : planned;
  }
  moves_ = moves_ || (decision != Decision::kKeep && !candidate.region);
  kept_ += decision == Decision::kKeep ? candidate.bytes : 0;
  return decision;
}

// Whether so many saved bytes fit within a budget in bytes beside other memory that grows as they do.
bool StepPlanner::fits_whole(std::uint64_t saved_bytes) const {
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  if (budget == nullptr || most_saved_ == 0) {
    return false;
  }
  const double growth = std::max(1.0, static_cast<double>(saved_bytes) / static_cast<double>(most_saved_));
  return static_cast<double>(saved_bytes) + growth * static_cast<double>(most_other_) <=
         static_cast<double>(budget->bytes);
}

std::optional<std::uint64_t> StepPlanner::recorded_step() const {
  return recording_ ? std::optional(step_) : std::nullopt;
}

void StepPlanner::learn(std::uint64_t step, const StepRecord& record) {
  if (recording_ && step == step_ && learned_ != step) {
    remember_signature();
  }
  auto recorded = recorded_.extract(step);
  if (recorded.empty()) {
    return;
  }
  learned_ = step;
  if (recorded.mapped().size() != record.storages.size()) {
    return;
  }
  const bool is_warm = most_saved_ > 0;
  std::uint64_t saved = 0;
  for (const StorageRecord& storage : record.storages) {
    saved += storage.bytes;
    most_other_ = std::max(most_other_, storage.other_bytes);
  }
  for (const StepRecord::Level& level : record.other) {
    most_other_ = std::max(most_other_, level.bytes);
  }
  most_saved_ = std::max(most_saved_, saved);
  leaves_alone_ = is_warm && !record.awaits_managed && record.managed.empty() && fits_whole(saved);
  auto known = std::ranges::find(known_, recorded.mapped(), &Known::signature);
  if (known == known_.end()) {
    known_.push_front({std::move(recorded.mapped()), 0});
    known = known_.begin();
    if (known_.size() > kMaxPlans && &known_.back() != following_) {
      known_.pop_back();
    }
  }
  known->record = record;
  const int wanted = record.awaits_managed ? kMostRecordedSteps : kRecordedSteps;
  if (++known->records >= wanted) {
    make_plan_of(*known);
  }
}

void StepPlanner::forget_plans() {
  if (following_ != nullptr) {
    strayed_ = true;
  }
  following_ = nullptr;
  known_.clear();
  recorded_.clear();
  host_bytes_ = first_host_bytes_;
  leaves_alone_ = false;
  most_saved_ = most_other_ = 0;
}

void StepPlanner::limit_host(std::uint64_t bytes) {
  if (bytes < host_bytes_) {
    host_bytes_ = bytes;
    host_limit_is_new_ = true;
  }
}

void StepPlanner::keep_to_host_limit() {
  if (!std::exchange(host_limit_is_new_, false)) {
    return;
  }
  for (Known& known : known_) {
    if (!planned(known) || known.plan->predicted.offloaded_bytes <= host_bytes_) {
      continue;
    }
    Known within = known;
    make_plan_of(within);
    if (within.plan->fits || !known.plan->fits) {
      known = std::move(within);
    }
  }
}

LinkRates StepPlanner::rates(const Known& known) const { return slower(rates_, known.copy_slowdown); }

void StepPlanner::make_plan_of(Known& known) const {
  known.plan = std::make_shared<Plan>(make_plan(known.record, goal_, host_bytes_, rates(known)));
}

// The factor by which copies were slower than the plan assumes, if a step that followed the plan took `step_ms`.
// Returns 1 if `step_ms` is within a few percent of the prediction, or if slower copies do not explain `step_ms`.
double StepPlanner::slowdown_that_explains(const Known& known, double step_ms) const {
  constexpr double kNear = 0.05;
  constexpr double kMost = 16;
  constexpr int kHalvings = 12;
  const auto predicted_ms = [&](double slowdown) {
    return predict(*known.plan, known.record, slower(rates(known), slowdown)).step_ms;
  };
  if (step_ms < predicted_ms(1) * (1 + kNear) || predicted_ms(kMost) < step_ms) {
    return 1;
  }
  double low = 1;
  double high = kMost;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (predicted_ms(middle) < step_ms ? low : high) = middle;
  }
  return high;
}

void StepPlanner::correct(const std::shared_ptr<const Plan>& plan, double end_ms, const StepCost& cost) {
  const auto known = std::ranges::find(known_, plan, &Known::plan);
  if (plan == nullptr || known == known_.end() || known->record.end_ms <= 0) {
    return;
  }
  Known corrected = *known;
  const bool times_differ = known->corrections < kCorrections && correct_times(corrected, end_ms, cost.ms);
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  const bool is_over = budget != nullptr && corrected.plan->fits && cost.peak_bytes > budget->bytes;
  if (is_over && known->memory_corrections < kMemoryCorrections) {
    Known with_more = corrected;
    ++with_more.memory_corrections;
    add_other_memory(with_more.record, cost.peak_bytes - corrected.plan->predicted.peak_bytes);
    make_plan_of(with_more);
    if (with_more.plan->fits) {
      *known = std::move(with_more);
      return;
    }
  }
  if (times_differ) {
    make_plan_of(corrected);
    if (corrected.plan->fits || !known->plan->fits) {  // there may be less host memory than the old plan was made for
      *known = std::move(corrected);
    }
  }
}

// Returns false, and changes nothing, where the times are as they were recorded.
bool StepPlanner::correct_times(Known& known, double end_ms, double step_ms) const {
  constexpr double kNear = 0.01;  // a difference from the record that counts as none
  const double factor = end_ms / known.record.end_ms;
  const bool as_recorded = factor > 1 - kNear && factor < 1 + kNear;
  if (!as_recorded) {
    scale_times(known.record, factor);
    auto scaled = std::make_shared<Plan>(*known.plan);  // the same plan, for the record with its times scaled
    if (scaled->managed) {
      scaled->managed->recompute_ms *= factor;
    }
    known.plan = std::move(scaled);
  }
  const double slowdown = slowdown_that_explains(known, step_ms);
  if (as_recorded && slowdown == 1) {
    return false;
  }
  known.copy_slowdown *= slowdown;
  ++known.corrections;
  return true;
}

const StepPlanner::Known* StepPlanner::last_plan() const {
  const auto found = std::ranges::find_if(known_, planned);
  return found == known_.end() ? nullptr : &*found;
}

// Makes the step follow a plan whose storages begin with those of the step so far. The present plan stays if it goes on
// with the storage that was saved last. Returns false if there is no such plan.
bool StepPlanner::choose_plan() {
  const std::size_t last = seen_.size() - 1;
  if (following_ != nullptr && last < following_->signature.size() && following_->signature[last] == seen_[last]) {
    return true;
  }
  const auto found = std::ranges::find_if(known_, [&](const Known& known) {
    return planned(known) && known.signature.size() >= seen_.size() &&
           std::equal(seen_.begin(), seen_.end(), known.signature.begin());
  });
  if (found == known_.end()) {
    following_ = nullptr;
    return false;
  }
  known_.splice(known_.begin(), known_, found);
  following_ = &known_.front();
  return true;
}

void StepPlanner::remember_signature() {
  recorded_[step_] = seen_;
  if (recorded_.size() > kMaxOpenRecords) {
    recorded_.erase(recorded_.begin());
  }
}

}  // namespace ebb
