#include "offload/autograd/core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "offload/base/backward_pass.h"
#include "offload/base/log.h"
#include "offload/planning/step_recorder.h"
#include "offload/report/summary.h"
#include "offload/tensors/lent_tensor.h"

namespace ebb {
namespace {

DeviceMeter meter(const Options& options, const Tier& tier) {
  return options.device_meter || !tier.device().is_cuda() ? options.device_meter : cuda_meter(tier.device());
}

}  // namespace

Core::Core(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace, std::shared_ptr<Planned> planned)
    : options_(std::move(options)),
      residency_({.record_timeline = options_.record_timeline,
                  .planned = planned != nullptr,
                  .stash_bytes = options_.stash_bytes,
                  .window_bytes = options_.window_bytes,
                  .let_go_of_unused = &sweep_unused_lent},
                 std::move(tier), std::move(trace)),
      planning_(planned == nullptr
                    ? nullptr
                    : std::make_unique<Planning>(
                          std::move(planned), residency_.shared_tier(), residency_.ledger().account(),
                          meter(options_, residency_.tier()),
                          options_.device_budget_is_a_wish ? Planning::Unmet::kWarn : Planning::Unmet::kThrow)),
      exclusions_(residency_.tier().device()),
      policy_needs_operation_(options_.policy->needs_operation()),
      policy_needs_recompute_(options_.policy->needs_recompute()),
      least_bytes_(options_.policy->least_bytes()) {}

std::shared_ptr<Tape> Core::tape_of_this_thread() {
  const std::shared_ptr<ThreadSteps> steps = residency_.steps().here();
  if (std::shared_ptr<Tape> last = steps->last(); last != nullptr && !last->in_use()) {
    return last;
  }
  if (!in_backward()) {  // else it is of the backward pass that this thread runs
    for (const std::shared_ptr<Tape>& earlier : steps->take_prefetching()) {
      earlier->drop_guesses();
    }
  }
  auto tape = make_shared_unless_forked<Tape>(residency_.book(), steps);
  steps->begin(tape);
  return tape;
}

bool Core::backward_begins(Tape& tape) {
  const bool others_in_use = residency_.steps().here()->in_backward() > 0;
  if (planning_ == nullptr) {
    warn_of_head(tape);
    return !others_in_use && residency_.stall_watch().backward_begins(tier().stall_stats(), tape.order_is_known());
  }
  const std::shared_ptr<StepRecorder> recorder = tape.recorder();
  if (recorder != nullptr) {
    recorder->backward_begins();
  }
  const std::shared_ptr<const Plan> plan = tape.plan();
  if (plan != nullptr) {
    const StepRecorder::Detour detour(recorder.get());
    residency_.stash().shrink_to(plan->room.stash.in_backward);
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
    planning_->learn(tape.plan(), *recorder, *record);
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

Stats Core::stats() {
  residency_.stash().sweep();  // what is over is not held
  const Counters& counters = residency_.ledger().counters();
  const DeviceAccount& account = *residency_.ledger().account();
  const Gauge& stash = residency_.stash().gauge();
  const Gauge& window = residency_.window();
  Stats stats;
  stats.saved = counters.saved.count();
  stats.offloaded = counters.offloaded.count();
  stats.dropped = counters.dropped.count();
  stats.evicted = counters.evicted.count();
  stats.deduplicated = counters.deduplicated.count();
  std::transform(counters.kept.begin(), counters.kept.end(), stats.kept.begin(),
                 [](const Counter& counter) { return counter.count(); });
  stats.fetched = counters.fetched.count();
  stats.recomputed = counters.recomputed.count();
  stats.reused = counters.reused.count();
  stats.steps = counters.steps;
  {
    const std::lock_guard lock(reset_mutex_);
    const StallStats stalls = tier().stall_stats();
    stats.stalls = stalls.count - stalls_at_reset_.count;
    stats.stalled_ms = stalls.total_ms - stalls_at_reset_.total_ms;
  }
  const PoolStats pool = tier().pool_stats();
  stats.pool = {pool.now_bytes, pool.peak_bytes, pool.capacity_bytes};
  stats.pool_growths = pool.growths;
  stats.stash = {stash.now_bytes(), stash.peak_bytes(), residency_.bounds().stash()};
  stats.window = {window.now_bytes(), window.peak_bytes(), residency_.bounds().window()};
  stats.saved_on_device = {account.held.now_bytes(), account.held.peak_bytes(), 0};
  stats.saved_if_kept = {account.if_kept.now_bytes(), account.if_kept.peak_bytes(), 0};
  return stats;
}

void Core::log_summary() noexcept {
  if (residency_.ledger().counters().steps < kEnoughSteps) {
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
  if (trace() == nullptr) {
    return {};
  }
  tier().update_trace();
  return trace()->take();
}

void Core::reset_stats() {
  residency_.ledger().counters().reset();
  residency_.stash().gauge().reset_peak();
  residency_.window().reset_peak();
  residency_.ledger().on_device().reset_peak();
  residency_.ledger().if_kept().reset_peak();
  const std::lock_guard lock(reset_mutex_);
  stalls_at_reset_ = tier().stall_stats();
}

}  // namespace ebb
