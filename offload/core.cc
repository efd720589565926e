#include "offload/core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "offload/counted_storage.h"
#include "offload/early_fetch.h"
#include "offload/engine.h"
#include "offload/lent_tensor.h"
#include "offload/log.h"
#include "offload/step_recorder.h"
#include "offload/summary.h"
#include "streams/checked_tier.h"

namespace ebb {
namespace {

// The automatic bounds of stash and window. On an H200, 2 GiB each hid every copy of a step that saves 27 GB, and 1.56
// GiB did not (+0.2 % and +2.3 % of step time). The larger window is for steps that wait for copies: it has to take
// what arrives while backward asks for nothing (Note [Before the first use] in stall_watch.h).
constexpr std::uint64_t kShareOfStep = 12;
constexpr std::uint64_t kShareOfStepThatWaits = 6;
constexpr std::uint64_t kMostBytes = std::uint64_t{2} << 30;

DeviceMeter meter(const Options& options, const Tier& tier) {
  return options.device_meter || !tier.device().is_cuda() ? options.device_meter : cuda_meter(tier.device());
}

}  // namespace

Core::Core(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace, std::shared_ptr<Planned> planned)
    : options_(std::move(options)),
      tier_(checked(std::move(tier))),
      trace_(std::move(trace)),
      no_bytes_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tier_->device())),
      account_(std::make_shared<DeviceAccount>(options_.record_timeline)),
      planning_(planned == nullptr
                    ? nullptr
                    : std::make_unique<Planning>(
                          std::move(planned), tier_, account_, meter(options_, *tier_),
                          options_.device_budget_is_a_wish ? Planning::Unmet::kWarn : Planning::Unmet::kThrow)),
      exclusions_(tier_->device()),
      policy_needs_operation_(options_.policy->needs_operation()),
      policy_needs_recompute_(options_.policy->needs_recompute()),
      least_bytes_(options_.policy->least_bytes()),
      stash_(*tier_) {}

std::shared_ptr<Tape> Core::tape_of_this_thread() {
  const std::shared_ptr<ThreadSteps> steps = steps_.here();
  if (std::shared_ptr<Tape> last = steps->last(); last != nullptr && !last->in_use()) {
    EarlyFetch::expect(shared_from_this(), last);
    return last;
  }
  if (!in_backward()) {  // else it is of the backward pass that this thread runs
    for (const std::shared_ptr<Tape>& earlier : steps->take_prefetching()) {
      earlier->drop_guesses();
    }
  }
  auto tape = make_shared_unless_forked<Tape>(book_, steps);
  steps->begin(tape);
  EarlyFetch::expect(shared_from_this(), tape);
  return tape;
}

std::uint64_t Core::evict(std::uint64_t bytes) noexcept {
  if (SavedStorage::fetches_ahead_here()) {
    return 0;
  }
  const std::uint64_t before = account_->held.now_bytes();
  const auto gone = [&] { return before - std::min(before, account_->held.now_bytes()); };
  const auto enough = [&] { return gone() >= bytes; };
  try {
    sweep_unused_lent();
    stash_.drain();
    if (enough()) {
      return gone();
    }
    ++account_->evictions;
    for (const std::shared_ptr<ThreadSteps>& steps : steps_.all()) {
      for (const std::shared_ptr<Tape>& tape : steps->take_prefetching()) {
        tape->make_room(enough);
      }
    }
    evictable_.evict(enough);
  } catch (...) {
    log_warning("a tensor that was kept could not be moved to make room on the device");
  }
  return gone();
}

bool Core::backward_begins(Tape& tape) {
  const bool others_in_use = steps_.here()->in_backward() > 0;
  if (planning_ == nullptr) {
    warn_of_head(tape);
    return !others_in_use && stall_watch_.backward_begins(tier_->stall_stats(), tape.order_is_known());
  }
  const std::shared_ptr<StepRecorder> recorder = tape.recorder();
  if (recorder != nullptr) {
    recorder->backward_begins();
  }
  const std::shared_ptr<const Plan> plan = tape.plan();
  if (plan != nullptr) {
    const StepRecorder::Detour detour(recorder.get());
    stash_.shrink_to(plan->room.stash.in_backward);
  }
  return plan != nullptr && !others_in_use;
}

// Note [The head]
// What is saved right before backward is wanted back at once, so that its copies are waited for from end to end. With a
// plan it stays, as all does whose way back is too short. Without one the user has to say so, and is told in the first
// step, if the last save looks like a head's: several times as large as any other.
void Core::warn_of_head(Tape& tape) {
  if (looked_for_head_.exchange(true)) {
    return;
  }
  constexpr std::uint64_t kTimes = 3;
  constexpr std::uint64_t kLarge = std::uint64_t{16} << 20;
  const Tape::LastSave last = tape.last_save();
  if (last.bytes >= kLarge && last.largest_before > 0 && last.bytes >= kTimes * last.largest_before) {
    log_warning("the step's last saved tensor, of " + human_bytes(last.bytes) +
                ", is moved right before backward wants it: put a NoOpGuard around the output head and the loss.");
  }
}

void Core::backward_is_over(Tape& tape, bool failed) {
  const std::shared_ptr<StepRecorder> recorder = planning_ == nullptr ? nullptr : tape.recorder();
  if (recorder == nullptr) {
    return;
  }
  if (failed) {  // what it has seen is not a step
    recorder->give_up();
    return;
  }
  if (const std::optional<StepRecord> record = recorder->finish()) {  // without the lock: it waits for the device
    const std::lock_guard lock(policy_mutex_);
    planning_->learn(tape, *recorder, *record);
  }
}

std::optional<PlanReport> Core::plan_report() {
  const std::lock_guard lock(policy_mutex_);
  return planning_ == nullptr ? std::nullopt : planning_->report();
}

std::string Core::explain() {
  const std::lock_guard lock(policy_mutex_);
  return planning_ == nullptr ? "no plan: Options::device_budget is not set\n" : planning_->explain();
}

std::uint64_t Core::stash_limit() const {
  return planning_ != nullptr ? 0 : options_.stash_bytes.value_or(automatic_limit(kShareOfStep));
}

std::uint64_t Core::stash_limit(Tape& tape, std::uint32_t ordinal) const {
  if (planning_ == nullptr) {
    return stash_limit();
  }
  const std::shared_ptr<const Plan> plan = tape.plan();
  return plan == nullptr || ordinal >= plan->room.stash.after_save.size() ? 0 : plan->room.stash.after_save[ordinal];
}

std::uint64_t Core::window_limit() const {
  if (planning_ != nullptr) {  // steps without a plan take the least memory: one storage at a time
    return 0;
  }
  return options_.window_bytes.value_or(
      automatic_limit(stall_watch_.steps_wait() ? kShareOfStepThatWaits : kShareOfStep));
}

std::uint64_t Core::automatic_limit(std::uint64_t share_of_step) const {
  return std::max(2 * book_->largest_bytes(), std::min(book_->saved_bytes() / share_of_step, kMostBytes));
}

c10::Storage Core::counted(c10::DataPtr memory, std::size_t bytes) {
  return counted_storage(std::move(memory), bytes, {account_, bytes});
}

Stats Core::stats() {
  stash_.sweep();  // what is over is not held
  Stats stats;
  stats.saved = counters_.saved.count();
  stats.offloaded = counters_.offloaded.count();
  stats.dropped = counters_.dropped.count();
  stats.evicted = counters_.evicted.count();
  stats.deduplicated = counters_.deduplicated.count();
  std::transform(counters_.kept.begin(), counters_.kept.end(), stats.kept.begin(),
                 [](const Counter& counter) { return counter.count(); });
  stats.fetched = counters_.fetched.count();
  stats.recomputed = counters_.recomputed.count();
  stats.reused = counters_.reused.count();
  stats.steps = counters_.steps;
  {
    const std::lock_guard lock(reset_mutex_);
    const StallStats stalls = tier_->stall_stats();
    stats.stalls = stalls.count - stalls_at_reset_.count;
    stats.stalled_ms = stalls.total_ms - stalls_at_reset_.total_ms;
  }
  const PoolStats pool = tier_->pool_stats();
  stats.pool = {pool.now_bytes, pool.peak_bytes, pool.capacity_bytes};
  stats.pool_growths = pool.growths;
  stats.stash = {stash_.gauge().now_bytes(), stash_.gauge().peak_bytes(), stash_limit()};
  stats.window = {window_.now_bytes(), window_.peak_bytes(), window_limit()};
  stats.saved_on_device = {account_->held.now_bytes(), account_->held.peak_bytes(), 0};
  stats.saved_if_kept = {account_->if_kept.now_bytes(), account_->if_kept.peak_bytes(), 0};
  return stats;
}

void Core::log_summary() noexcept {
  if (counters_.steps < kEnoughSteps) {
    return;
  }
  try {
    const Stats now = stats();
    log_info(summary(now));
    if (planning_ != nullptr) {  // its recorded steps move whatever they can, and the others what the budget asks for
      return;
    }
    const std::lock_guard lock(policy_mutex_);
    for (const std::string& warning : warnings(now, options_.policy->matches())) {
      log_warning(warning);
    }
  } catch (...) {  // no memory for it, or a logger that throws
  }
}

std::vector<TraceSpan> Core::take_trace() {
  if (trace_ == nullptr) {
    return {};
  }
  tier_->update_trace();
  return trace_->take();
}

void Core::reset_stats() {
  counters_.reset();
  stash_.gauge().reset_peak();
  window_.reset_peak();
  account_->held.reset_peak();
  account_->if_kept.reset_peak();
  const std::lock_guard lock(reset_mutex_);
  stalls_at_reset_ = tier_->stall_stats();
}

}  // namespace ebb
