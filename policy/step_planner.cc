#include "policy/step_planner.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>
#include <variant>

#include "policy/goal_planner.h"
#include "policy/resized_step.h"

namespace ebb {
namespace {

constexpr std::size_t kMaxOpenRecords = 4;

// How many of the next steps may be recorded to find one that is like a step that has strayed.
constexpr int kPatience = 8;

// How many steps do not rest after one has strayed from rest.
constexpr int kRestless = 64;

bool planned(const StepPlanner::Known& known) { return known.plan != nullptr; }

// Whether the storages are of the same operations, as far as there are storages of both.
bool begin_alike(const StepPlanner::Signature& one, const StepPlanner::Signature& other) {
  const std::size_t count = std::min(one.size(), other.size());
  return std::equal(one.begin(), one.begin() + static_cast<std::ptrdiff_t>(count), other.begin(),
                    [](const auto& a, const auto& b) { return a.operation == b.operation; });
}

bool are_of_one_structure(const StepPlanner::Signature& one, const StepPlanner::Signature& other) {
  return one.size() == other.size() && begin_alike(one, other);
}

// A plan for a size serves sizes that are smaller by at most one part in so many. So at most as many plans are made for
// sizes from one to twice that.
constexpr std::uint64_t kSizes = 32;

std::uint64_t rounded_up(std::uint64_t size) {
  const std::uint64_t unit = std::max<std::uint64_t>(std::bit_floor(size) / kSizes, 1);
  return (size + unit - 1) / unit * unit;
}

// Sizes hardly differ where the smaller one is less by at most one part in so many. A plan of a recorded step serves
// steps whose storages are hardly smaller.
constexpr std::uint64_t kSmaller = 10;

bool hardly_differ(std::uint64_t least, std::uint64_t most) { return (most - least) * kSmaller <= most; }

// Whether the storage is the known step's at this place. Where the known step stands for steps of a size, which the
// first storage tells, the others may be a little larger or smaller than is expected. (A kernel pads what it saves,
// say.) `may_be_smaller`: kSmaller holds.
bool is_known_at(const StepPlanner::Known& known, std::size_t place, const StepPlanner::Key& key, bool may_be_smaller) {
  const StepPlanner::Key& expected = known.signature[place];
  const auto [least, most] = std::minmax(expected.bytes, key.bytes);
  const bool is_near = place == 0 ? rounded_up(key.bytes) == expected.bytes : (most - least) * kSizes / 2 <= most;
  const bool is_smaller = may_be_smaller && key.bytes == least && hardly_differ(least, most);
  return key.operation == expected.operation && (least == most || is_smaller || (known.records == 0 && is_near));
}

bool begins_with(const StepPlanner::Known& known, const StepPlanner::Signature& seen, bool may_be_smaller) {
  std::size_t place = 0;
  return known.signature.size() >= seen.size() &&
         std::ranges::all_of(seen, [&](const auto& key) { return is_known_at(known, place++, key, may_be_smaller); });
}

bool tells_of_sizes(const StepPlanner::Known& known) {
  return known.records > 0 && known.is_warm && !known.record.is_preliminary && known.record.end_ms > 0 &&
         !known.signature.empty() && known.signature.front().bytes > 0;
}

std::uint64_t size_of(const StepPlanner::Known& known) { return known.signature.front().bytes; }

Growth growth_of(const StepPlanner::Known& one, const StepPlanner::Known& other, std::uint64_t size) {
  return {one.signature.front().bytes, other.signature.front().bytes, size};
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
  if (now_.moves && !recording_ && (now_.strayed || last_plan() == nullptr)) {
    leaves_alone_ = false;
  }
  restless_ = std::max(restless_ - 1, 0);
  if (now_.strayed && now_.moves && now_.has_recipes) {
    wanted_ = *now_.seen;
    patience_ = kPatience;
  } else if (now_.strayed && now_.moves) {
    restless_ = kRestless;
  }
  keep_to_host_limit();
  const auto has_plan = [&](const Signature& signature) {
    return std::ranges::any_of(known_, [&](const Known& each) {
      const Known* const other = are_of_one_structure(each.signature, signature) ? unlike_in_size(each) : nullptr;
      return planned(each) && (each.signature == signature ||
                               (other != nullptr && growth_of(each, *other, signature.front().bytes).is_known()));
    });
  };
  recording_ = !too_long_ && ((patience_ > 0 && !has_plan(wanted_)) || (!leaves_alone_ && last_plan() == nullptr));
  too_long_ = false;
  patience_ = std::max(patience_ - 1, 0);
  now_ = {};
  ++step_;
  if (recording_) {
    if (recorded_.size() > kMaxOpenRecords) {
      recorded_.erase(recorded_.begin());
    }
    recorded_[step_] = now_.seen;
  }
}

// The forward pass was evaluation, or its graph was dropped: no record of the step will come.
void StepPlanner::drop_step() {
  stop_recording();
  now_ = {};
}

void StepPlanner::stop_recording() {
  recording_ = false;
  recorded_.erase(step_);
}

void StepPlanner::looks_for_no_recipes() {
  stop_recording();
  now_.has_recipes = false;
}

bool StepPlanner::rests(const Candidate& candidate) {
  const bool begins = !std::exchange(now_.has_begun, true);
  if (!begins && !now_.rests) {
    return false;
  }
  const Key key{candidate.bytes, std::string(candidate.operation)};
  if (begins) {
    now_.following = plan_at_rest(key);
    now_.rests = now_.following != nullptr || (leaves_alone_ && !recording_ && last_plan() == nullptr);
  }
  if (now_.rests && !goes_on_at_rest(key)) {
    stray_from_rest();
  }
  now_.kept += now_.rests ? candidate.bytes : 0;
  return now_.rests;
}

void StepPlanner::stray_from_rest() {
  now_.rests = false;
  now_.has_recipes = false;
  now_.following = nullptr;
  now_.strayed = true;
}

// The place of the next storage of the signature that autograd saves by itself.
static std::size_t next_save(const StepPlanner::Signature& signature, std::size_t place) {
  while (place < signature.size() && signature[place].operation == StepPlanner::kNotSaved) {
    ++place;
  }
  return place;
}

// What is known of the step that may rest and begins with this storage; null for none.
StepPlanner::Known* StepPlanner::plan_at_rest(const Key& first) {
  if (recording_ || restless_ > 0) {
    return nullptr;
  }
  auto found = known_.end();
  for (auto each = known_.begin(); each != known_.end(); ++each) {
    const std::size_t place = next_save(each->signature, 0);
    if (!planned(*each) || place == each->signature.size() ||
        !is_known_at(*each, place, first, /*may_be_smaller=*/true)) {
      continue;
    }
    const Plan& plan = *each->plan;
    const bool keeps_all = std::ranges::all_of(plan.decisions, [](auto what) { return what == Decision::kKeep; });
    if (!plan.fits || !keeps_all || plan.managed || !each->correction.is_checked ||
        (found != known_.end() && found->structure != each->structure)) {
      return nullptr;
    }
    found = found == known_.end() ? each : found;
  }
  if (found == known_.end()) {
    return nullptr;
  }
  known_.splice(known_.begin(), known_, found);
  return &known_.front();
}

// Whether the storage is one that the plan has next, or a later save of what recipes have begun from. Without a plan,
// whether the step still fits whole.
bool StepPlanner::goes_on_at_rest(const Key& key) {
  if (now_.following == nullptr) {
    return fits_whole(now_.kept + key.bytes);
  }
  const Signature& expected = now_.following->signature;
  const std::size_t place = next_save(expected, now_.next_at_rest);
  if (place < expected.size() && is_known_at(*now_.following, place, key, /*may_be_smaller=*/true)) {
    now_.next_at_rest = place + 1;
    return !takes_more_than_planned(place, key.bytes);
  }
  const auto is_it = [&](std::uint64_t each) {
    const auto [least, most] = std::minmax(expected[each].bytes, key.bytes);
    return each < now_.next_at_rest && hardly_differ(least, most);
  };
  return now_.saved_later++ < std::ranges::count_if(now_.following->saved_later, is_it);
}

void StepPlanner::saved_later(std::uint64_t ordinal) {
  Known* const known = now_.following;
  if (known != nullptr && ordinal < known->signature.size() &&
      std::ranges::find(known->saved_later, ordinal) == known->saved_later.end()) {
    known->saved_later.push_back(ordinal);
  }
}

StepPlanner::Answer StepPlanner::decide(const Candidate& candidate) {
  const Decision decision = decision_about(candidate);
  const Known* const known = now_.following;
  return known == nullptr ? Answer{decision, nullptr} : Answer{decision, known->plan, known->structure, revision_};
}

Decision StepPlanner::decision_about(const Candidate& candidate) {
  if (candidate.bytes < least_bytes_) {
    return Decision::kKeep;
  }
  if (now_.rests) {  // another thread's step
    stray_from_rest();
  }
  const std::size_t index = now_.seen->size();
  if (index == kMostStorages) {
    too_long_ = true;
    met_long_step_ = true;
    stop_recording();
    now_.moves = true;
    return safe(candidate);
  }
  now_.seen->push_back({candidate.bytes, std::string(candidate.operation)});
  const bool is_other = index == 0 && recording_ && !wanted_.empty() && now_.seen->front() != wanted_.front();
  if (is_other && choose_plan()) {
    if (now_.following->plan->fits) {
      stop_recording();  // the step is known
    } else {
      now_.following = nullptr;
    }
  }
  now_.strayed = now_.strayed || (!recording_ && (!choose_plan() || takes_more_than_planned(index, candidate.bytes)));
  const bool stays = leaves_alone_ && !recording_ && !now_.moves && fits_whole(now_.kept + candidate.bytes);
  Decision decision = stays ? Decision::kKeep : safe(candidate);
  if (now_.following != nullptr) {
    const Decision planned = now_.following->plan->decisions[index];
    decision = planned == Decision::kRecompute ? safe(candidate) : planned;
  }
  now_.moves = now_.moves || decision != Decision::kKeep;
  now_.kept += decision == Decision::kKeep ? candidate.bytes : 0;
  return decision;
}

// Adds a storage of the plan that is followed. Whether those of the step so far are larger than is expected, by more
// than the plan leaves of the budget.
bool StepPlanner::takes_more_than_planned(std::size_t place, std::uint64_t bytes) {
  const Plan& plan = *now_.following->plan;
  now_.unplanned +=
      static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(now_.following->signature[place].bytes);
  const bool is_more = plan.device_bytes != kUnlimited && now_.unplanned > 0 &&
                       plan.predicted.peak_bytes + static_cast<std::uint64_t>(now_.unplanned) > plan.device_bytes;
  now_.following = is_more ? nullptr : now_.following;
  return is_more;
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
  const auto recorded = recorded_.extract(step);
  if (recorded.empty() || recorded.mapped()->size() != record.storages.size()) {
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
  leaves_alone_ = is_warm && !record.is_preliminary && record.managed.empty() && fits_whole(saved);
  auto known = std::ranges::find(known_, *recorded.mapped(), &Known::signature);
  if (known == known_.end()) {
    known_.push_front({*recorded.mapped(), structure_of(*recorded.mapped())});
    known = known_.begin();
    forget_oldest();
  }
  const auto mate = std::ranges::find_if(
      known_, [&](const Known& each) { return each.structure == known->structure && each.records > 0; });
  known->correction = mate == known_.end() ? Correction() : mate->correction;
  known->record = slowed(record, known->correction.slower, known->correction.more_bytes);
  known->is_warm = known->is_warm || is_warm;
  const int wanted = record.is_preliminary ? kMostRecordedSteps : kRecordedSteps;
  const bool is_enough = ++known->records >= wanted;
  for (Known& each : known_) {
    each.correction.is_checked = each.correction.is_checked && each.structure != known->structure;
    const bool is_new = &each == &*known;
    if ((is_new && is_enough) || ((is_new || !planned(each)) && unlike_in_size(each) != nullptr)) {
      make_plan_of(each);
      ++revision_;
    }
  }
  if (!planned(*known) && records_near(*known) > wanted) {
    make_plan_of(*known);
    ++revision_;
    known->plan = known->plan->fits ? known->plan : nullptr;  // another record may tell of a step that takes less
  }
}

// Of steps of the structure whose sizes hardly differ: they tell nothing of other sizes.
int StepPlanner::records_near(const Known& known) const {
  int records = 0;
  for (const Known& each : known_) {
    if (each.structure == known.structure && !known.signature.empty()) {
      const auto [least, most] = std::minmax({size_of(each), size_of(known)});
      records += hardly_differ(least, most) ? each.records : 0;
    }
  }
  return records;
}

std::uint64_t StepPlanner::structure_of(const Signature& signature) {
  for (const Known& each : known_) {
    if (are_of_one_structure(each.signature, signature)) {
      return each.structure;
    }
  }
  return ++structures_;
}

// What is known of steps that were not recorded goes first: it can be made again.
void StepPlanner::forget_oldest() {
  if (known_.size() <= kMaxPlans) {
    return;
  }
  auto oldest = std::find_if(known_.rbegin(), known_.rend(), [&](const Known& each) {
    return each.records == 0 && planned(each) && &each != now_.following;
  });
  oldest = oldest == known_.rend() ? known_.rbegin() : oldest;
  if (&*oldest != now_.following) {
    known_.erase(std::prev(oldest.base()));
  }
}

void StepPlanner::forget_plans() {
  if (now_.rests) {
    stray_from_rest();
  } else if (std::exchange(now_.following, nullptr) != nullptr) {
    now_.strayed = true;
  }
  known_.clear();
  std::erase_if(recorded_, [&](const auto& each) { return each.first != step_; });
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
      ++revision_;
    }
  }
}

LinkRates StepPlanner::rates(const Known& known) const { return slower(rates_, known.correction.copy_slowdown); }

// `larger`: null, or what is known of a larger step of the structure, from whose plan this one is made.
void StepPlanner::make_plan_of(Known& known, const Known* larger) const {
  const std::vector<Decision>* const near = larger == nullptr ? nullptr : &larger->plan->decisions;
  known.plan = std::make_shared<Plan>(make_plan(known.record, goal_, host_bytes_, rates(known), near));
}

// The planned step of the structure whose size is the next above this one, and not far from it; null for none.
const StepPlanner::Known* StepPlanner::a_little_larger(const Known& known) const {
  const Known* found = nullptr;
  for (const Known& each : known_) {
    const bool may_be = each.structure == known.structure && planned(each) && each.plan->fits &&
                        size_of(each) >= size_of(known) && hardly_differ(size_of(known), size_of(each));
    if (may_be && (found == nullptr || size_of(each) < size_of(*found))) {
      found = &each;
    }
  }
  return found;
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

bool StepPlanner::correct(const std::shared_ptr<const Plan>& plan, double end_ms, const StepCost& cost) {
  const auto known = std::ranges::find(known_, plan, &Known::plan);
  if (plan == nullptr || known == known_.end() || known->record.end_ms <= 0) {
    return false;
  }
  Known corrected = *known;
  corrected.correction.is_checked = false;
  const bool times_differ = known->correction.of_times < kCorrections && correct_times(corrected, end_ms, cost.ms);
  const auto* const budget = std::get_if<DeviceBytes>(&goal_);
  const bool is_over = budget != nullptr && corrected.plan->fits && cost.peak_bytes > budget->bytes;
  if (is_over && known->correction.of_memory < kMemoryCorrections) {
    Known with_more = corrected;
    ++with_more.correction.of_memory;
    const std::uint64_t more = cost.peak_bytes - corrected.plan->predicted.peak_bytes;
    with_more.record = changed(std::move(with_more.record), std::identity(), static_cast<std::int64_t>(more));
    with_more.correction.more_bytes += static_cast<std::int64_t>(more);
    make_plan_of(with_more);
    if (with_more.plan->fits) {
      put_corrected(*known, std::move(with_more));
      return true;
    }
  }
  if (times_differ) {
    make_plan_of(corrected);
    if (corrected.plan->fits || !known->plan->fits) {  // there may be less host memory than the old plan was made for
      put_corrected(*known, std::move(corrected));
      return true;
    }
  }
  for (Known& each : known_) {
    each.correction.is_checked = each.structure == known->structure ? !is_over : each.correction.is_checked;
  }
  return false;
}

// For the step's structure, too. But for the step that has begun by now, whose plan stays, what was made from two
// others is made again when such a step comes.
void StepPlanner::put_corrected(Known& known, Known corrected) {
  known = std::move(corrected);
  for (auto each = known_.begin(); each != known_.end();) {
    const auto here = each++;
    if (&*here == &known || &*here == now_.following || here->structure != known.structure) {
      continue;
    }
    if (here->records == 0) {
      known_.erase(here);
      continue;
    }
    Known with = *here;
    with.record = slowed(std::move(with.record), known.correction.slower / with.correction.slower,
                         known.correction.more_bytes - with.correction.more_bytes);
    with.correction = known.correction;
    if (planned(with)) {
      make_plan_of(with);
      with.plan = with.plan->fits || !here->plan->fits ? with.plan : here->plan;
    }
    *here = std::move(with);
  }
}

// Returns false, and changes nothing, where the times are as they were recorded.
bool StepPlanner::correct_times(Known& known, double end_ms, double step_ms) const {
  constexpr double kNear = 0.01;  // a difference from the record that counts as none
  const double factor = end_ms / known.record.end_ms;
  const bool as_recorded = factor > 1 - kNear && factor < 1 + kNear;
  if (!as_recorded) {
    known.record = slowed(std::move(known.record), factor, 0);
    known.correction.slower *= factor;
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
  known.correction.copy_slowdown *= slowdown;
  ++known.correction.of_times;
  return true;
}

const StepPlanner::Known* StepPlanner::last_plan() const {
  const auto found = std::ranges::find_if(known_, planned);
  return found == known_.end() ? nullptr : &*found;
}

// Makes the step follow a plan whose storages begin with those of the step so far. The present plan stays if it goes on
// with the storage that was saved last. Returns false if there is no such plan.
bool StepPlanner::choose_plan() {
  const Signature& seen = *now_.seen;
  Known*& following = now_.following;
  if (following != nullptr && seen.size() <= following->signature.size() &&
      is_known_at(*following, seen.size() - 1, seen.back(), now_.may_be_smaller)) {
    return true;
  }
  const auto follow = [&](bool is_recorded, bool may_be_smaller) {
    const auto found = std::ranges::find_if(known_, [&](const Known& known) {
      return planned(known) && (known.records > 0) == is_recorded && begins_with(known, seen, may_be_smaller);
    });
    if (found == known_.end()) {
      return false;
    }
    known_.splice(known_.begin(), known_, found);
    following = &known_.front();
    now_.may_be_smaller = may_be_smaller;
    return true;
  };
  if (follow(/*is_recorded=*/true, /*may_be_smaller=*/false) || follow(/*is_recorded=*/false, false)) {
    return true;
  }
  following = make_resized();
  now_.may_be_smaller = false;
  return following != nullptr || follow(/*is_recorded=*/true, /*may_be_smaller=*/true);
}

// Of the recorded steps of the same structure, the one whose size differs the most. Null where there is none that tells
// of sizes, or where the step's own record says too little.
const StepPlanner::Known* StepPlanner::unlike_in_size(const Known& known) const {
  const Known* found = nullptr;
  double most = 1;
  for (const Known& each : known_) {
    if (each.structure != known.structure || !tells_of_sizes(each) || !tells_of_sizes(known) ||
        each.record.managed_device_bytes != known.record.managed_device_bytes) {
      continue;
    }
    const auto [smaller, larger] = std::minmax({size_of(each), size_of(known)});
    const double ratio = static_cast<double>(larger) / static_cast<double>(smaller);
    if (ratio > most && growth_of(each, known, known.signature.front().bytes).is_known()) {
      most = ratio;
      found = &each;
    }
  }
  return found;
}

// Where the first storage tells the step's size, and two steps of the structure are known: makes what is known of a
// step of that size, with its plan. Null otherwise, and where no plan fits: the step is then recorded itself.
StepPlanner::Known* StepPlanner::make_resized() {
  const Signature& seen = *now_.seen;
  for (const Known& one : known_) {
    const Known* const other = seen.size() == 1 && begin_alike(one.signature, seen) ? unlike_in_size(one) : nullptr;
    if (other == nullptr || !growth_of(one, *other, seen.front().bytes).is_known()) {
      continue;
    }
    const Growth growth = growth_of(one, *other, rounded_up(seen.front().bytes));
    Known made;
    made.signature = one.signature;
    made.structure = one.structure;
    made.saved_later = one.saved_later;
    made.correction = one.correction;
    for (std::size_t i = 0; i < made.signature.size(); ++i) {
      made.signature[i].bytes = growth.bytes(one.signature[i].bytes, other->signature[i].bytes);
    }
    made.record = resized(one.record, other->record, growth);
    make_plan_of(made, a_little_larger(made));
    if (!made.plan->fits) {
      continue;
    }
    known_.push_front(std::move(made));
    now_.following = &known_.front();
    forget_oldest();
    return now_.following;
  }
  return nullptr;
}

}  // namespace ebb
