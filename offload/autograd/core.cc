#include "offload/autograd/core.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>

#include "offload/autograd/region_saves.h"
#include "offload/base/backward_pass.h"
#include "offload/base/human_bytes.h"
#include "offload/base/log.h"
#include "offload/planning/step_recorder.h"
#include "offload/recompute/graph_recipe.h"
#include "offload/report/summary.h"
#include "offload/tensors/lent_tensor.h"
#include "offload/tensors/put_off.h"
#include "streams/base/system_memory.h"

namespace ebb {
namespace {

DeviceMeter meter(const Options& options, const Tier& tier) {
  return options.device_meter || !tier.device().is_cuda() ? options.device_meter : cuda_meter(tier.device());
}

// What a recipe takes, as far as it is of the same recorded step.
std::vector<std::uint32_t> inputs_in(const StepRecorder& recorder, const GraphRecipe* recipe) {
  std::vector<std::uint32_t> inputs;
  if (recipe != nullptr) {
    for (const auto& input : recipe->inputs()) {
      const SavedStorage* const storage = input == nullptr ? nullptr : input->storage();
      if (const auto index = storage == nullptr ? std::nullopt : storage->index_in(recorder)) {
        inputs.push_back(*index);
      }
    }
  }
  return inputs;
}

std::uint64_t storage_bytes(const at::Tensor& tensor) { return tensor.has_storage() ? tensor.storage().nbytes() : 0; }

}  // namespace

Core::Core(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace, std::shared_ptr<Planned> planned)
    : options_(std::move(options)),
      residency_({.record_timeline = options_.record_timeline,
                  .planned = planned != nullptr,
                  .stash_bytes = options_.stash_bytes,
                  .window_bytes = options_.window_bytes,
                  .free_unused = &free_unused_lent},
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

std::optional<Kept> Core::passed_through(const at::Tensor& tensor) {
  const std::optional<Kept> never_moved = exclusions_.reason(tensor);
  return never_moved || storage_bytes(tensor) >= least_bytes_ ? never_moved : Kept::kPolicy;
}

void Core::count_kept(Kept reason, const at::Tensor& tensor) {
  const std::uint64_t bytes = reason == Kept::kUnmovable ? 0 : storage_bytes(tensor);
  residency_.ledger().expect_request(bytes);
  residency_.ledger().counters().saved.add(bytes);
  residency_.ledger().counters().kept[static_cast<std::size_t>(reason)].add(bytes);
}

Core::Entry Core::enter(StorageTable& table, const at::Tensor& tensor, const std::shared_ptr<Tape>& tape) {
  const c10::Storage& storage = tensor.storage();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  Entry entry;
  entry.saved = table.find_or_insert(
      storage, VersionId(version),
      [&] { return make_shared_unless_forked<SavedStorage>(shared_residency(), tape, storage, version); },
      entry.is_new);
  return entry;
}

void Core::count_save(const SavedStorage& saved, bool is_new) {
  Counters& counters = residency_.ledger().counters();
  counters.saved.add(saved.bytes());
  if (!is_new) {
    counters.deduplicated.add(saved.bytes());
  }
}

std::shared_ptr<SavedStorage> Core::save(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape, Start start) {
  residency_.ledger().expect_request(storage_bytes(tensor));
  const auto [saved, is_new] = enter(residency_.table(), tensor, tape);
  if (is_new) {
    place(saved, tensor, *tape, start);
  }
  count_save(*saved, is_new);
  return saved;
}

std::shared_ptr<SavedStorage> Core::keep(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                                         RegionSaves& region) {
  residency_.ledger().expect_request(storage_bytes(tensor));
  const VersionId version(tensor.unsafeGetTensorImpl()->version_counter());
  if (std::shared_ptr<SavedStorage> known = residency_.table().find(tensor.storage(), version)) {
    count_save(*known, /*is_new=*/false);
    return known;
  }
  const auto [saved, is_new] = enter(region.table, tensor, tape);
  if (is_new) {
    saved->enter_step(region.ordinal, nullptr, 0);
    stay(*saved, Kept::kPolicy);
  }
  count_save(*saved, is_new);
  return saved;
}

void Core::stay(SavedStorage& saved, Kept reason) {
  saved.stays();
  residency_.ledger().count_kept(reason, saved.bytes());
  if (reason == Kept::kPolicy && options_.evict_when_out_of_memory) {
    saved.may_be_evicted(tier().current_stream());
  }
}

void Core::place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, Tape& tape, Start start) {
  const std::uint64_t bytes = saved->bytes();
  std::unique_ptr<GraphRecipe> recipe = policy_needs_recompute_ ? GraphRecipe::find(tensor) : nullptr;
  const auto [decision, ordinal] = decide(tensor, *saved, tape, recipe.get());
  shrink_stash(tape, ordinal);
  if (decision == Decision::kRecompute && recipe != nullptr) {
    residency_.ledger().count_dropped(bytes);
    saved->drop(std::move(recipe));
    return;
  }
  if (decision != Decision::kOffload) {
    stay(*saved, Kept::kPolicy);
    return;
  }
  check_window(bytes);
  std::optional<Block> block = tier().try_acquire(bytes);
  warn_if_host_memory_is_short();
  if (!block) {
    stay(*saved, Kept::kNoRoom);
    if (planning_ != nullptr && tape.plan() != nullptr && !warned_of_no_room_.exchange(true)) {
      log_warning("a plan has " + human_bytes(bytes) +
                  " away that find no room in host memory or on disk: they stay, and Options::device_budget may be "
                  "exceeded");
    }
    return;
  }
  if (start == Start::kNow) {
    saved->send_out(*std::move(block), tier().current_stream());
  } else {
    saved->stays();
    saved->send_out_later(*std::move(block), tier().current_stream());
    PutOff::of_this_thread().add(saved);
  }
}

Core::Decided Core::decide(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const GraphRecipe* recipe) {
  Candidate candidate;
  candidate.bytes = tensor.storage().nbytes();
  std::string operation;
  if (policy_needs_operation_) {
    if (const auto& grad_fn = tensor.grad_fn()) {
      operation = grad_fn->name();
    }
    candidate.operation = operation;
  }
  candidate.recompute = recipe == nullptr ? Recompute::kNo : recipe->cost();
  const std::lock_guard lock(policy_mutex_);
  const Decision decision = ask(candidate, tape);
  if (planning_ != nullptr) {
    enter_step(tensor, saved, tape, recipe, candidate);
  }
  return {decision, static_cast<std::uint32_t>(candidate.ordinal)};
}

// LOCK: policy_mutex_
Decision Core::ask(Candidate& candidate, Tape& tape) {
  candidate.ordinal = tape.next_candidate();
  if (candidate.ordinal == 0) {
    if (residency_.book()->take_dropped()) {
      options_.policy->drop_step();
    }
    options_.policy->begin_step();
    ++residency_.ledger().counters().steps;
    if (planning_ != nullptr) {
      tape.record_by(planning_->step_begun());
      tape.follow(nullptr);
    }
  }
  const Decision decision = options_.policy->decide(candidate);
  if (planning_ != nullptr) {
    if (std::shared_ptr<const Plan> plan = planning_->plan(); plan != tape.plan()) {
      auto recorder = planning_->follows(plan);  // may throw: then nothing is followed
      tape.follow(std::move(plan));
      if (recorder) {
        tape.record_by(*std::move(recorder));
      }
    }
  }
  return decision;
}

// To what the plan has room for after the candidate.
void Core::shrink_stash(Tape& tape, std::uint32_t ordinal) {
  if (planning_ != nullptr && tape.plan() != nullptr) {
    const std::shared_ptr<StepRecorder> recorder = tape.recorder();
    const StepRecorder::Detour detour(recorder.get());
    residency_.stash().shrink_to(residency_.bounds().stash(tape, ordinal));
  }
}

std::optional<Core::RegionsPlace> Core::region_begins(const std::vector<at::Tensor>& inputs, Tape& tape) {
  if (planning_ == nullptr) {
    return std::nullopt;
  }
  Candidate candidate;
  candidate.region = true;
  candidate.operation = "ebb::checkpoint";
  candidate.recompute = Recompute::kComputeBound;
  std::vector<std::shared_ptr<SavedStorage>> saved;  // of the inputs, as far as they are saved
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.has_storage()) {
      saved.push_back(
          residency_.table().find(input.storage(), VersionId(input.unsafeGetTensorImpl()->version_counter())));
    }
  }
  const std::optional<RegionsPlace> place = [&] {
    const std::lock_guard lock(policy_mutex_);
    return ask_for_region(candidate, saved, tape);
  }();
  shrink_stash(tape, static_cast<std::uint32_t>(candidate.ordinal));
  return place;
}

// LOCK: policy_mutex_
Core::RegionsPlace Core::ask_for_region(Candidate& candidate, const std::vector<std::shared_ptr<SavedStorage>>& inputs,
                                        Tape& tape) {
  tape.began();
  auto ended = c10::make_scope_exit([&tape] { tape.ended(); });  // for one that the policy refuses
  RegionsPlace place{ask(candidate, tape) == Decision::kKeep, tape.recorder(), 0,
                     static_cast<std::uint32_t>(candidate.ordinal)};
  if (place.recorder != nullptr) {
    std::vector<std::uint32_t> indices;
    for (const std::shared_ptr<SavedStorage>& input : inputs) {
      if (const auto index = input == nullptr ? std::nullopt : input->index_in(*place.recorder)) {
        indices.push_back(*index);
      }
    }
    place.index = place.recorder->region_begins(std::move(indices));
  }
  ended.release();
  return place;
}

void Core::enter_step(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const GraphRecipe* recipe,
                      const Candidate& candidate) {
  const std::shared_ptr<StepRecorder> recorder = tape.recorder();
  std::uint32_t index = 0;
  if (recorder != nullptr) {
    index = recorder->saved(tensor.storage(), candidate.recompute, inputs_in(*recorder, recipe), saved.held_by_ebb());
  }
  const auto ordinal = static_cast<std::uint32_t>(candidate.ordinal);
  saved.enter_step(ordinal, recorder, index);
}

void Core::check_window(std::uint64_t bytes) const {
  TORCH_CHECK(!options_.window_bytes || bytes <= *options_.window_bytes, "ebb: Options::window_bytes is ",
              human_bytes(options_.window_bytes.value_or(0)), ", but a tensor to offload has ", human_bytes(bytes),
              ": it could never be fetched ahead. Set the window to at least the largest tensor's bytes, or keep such "
              "tensors by a policy or a NoOpGuard.");
}

// Reading the kernel's figures takes tens of microseconds, so only when the pool has asked the system for more.
void Core::warn_if_host_memory_is_short() {
  const PoolStats pool = tier().pool_stats();
  const std::uint64_t asked = pool.growths + pool.refusals;
  if (asked_system_.exchange(asked) == asked || warned_of_host_memory_) {
    return;
  }
  const SystemMemory memory = read_system_memory();
  const double used = 1.0 - static_cast<double>(memory.available_bytes) / static_cast<double>(memory.total_bytes);
  if (used <= options_.host_memory_warning || warned_of_host_memory_.exchange(true)) {
    return;
  }
  log_warning("host memory in use is over " + std::to_string(std::lround(100 * options_.host_memory_warning)) +
              " %: " + human_bytes(memory.available_bytes) + " of " + human_bytes(memory.total_bytes) +
              " are available; saves hold " + human_bytes(pool.capacity_bytes) +
              (tier().device().is_cpu() ? " of disk" : " of it") + ". Options::capacity_bytes bounds that.");
}

}  // namespace ebb
