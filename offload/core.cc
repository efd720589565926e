#include "offload/core.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "offload/early_fetch.h"
#include "offload/engine.h"
#include "offload/log.h"
#include "offload/put_off.h"
#include "offload/recipe.h"
#include "offload/step_recorder.h"
#include "streams/checked_tier.h"
#include "streams/system_memory.h"

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

// What a recipe takes, as far as it is of the same recorded step.
std::vector<std::uint32_t> inputs_in(const StepRecorder& recorder, const Recipe* recipe) {
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
  const std::vector<std::shared_ptr<Tape>> earlier = tapes(std::this_thread::get_id());
  if (!earlier.empty() && !earlier.back()->in_use()) {
    EarlyFetch::expect(shared_from_this(), earlier.back());
    return earlier.back();
  }
  if (!in_backward()) {  // else it is of the backward pass that this thread runs
    std::ranges::for_each(earlier, &Tape::drop_guesses);
  }
  auto tape = make_shared_unless_forked<Tape>(book_);
  const std::lock_guard lock(tapes_mutex_);
  std::erase_if(tapes_, [](const auto& entry) { return entry.tape.expired(); });
  tapes_.push_back({std::this_thread::get_id(), tape});
  EarlyFetch::expect(shared_from_this(), tape);
  return tape;
}

std::vector<std::shared_ptr<Tape>> Core::tapes(std::optional<std::thread::id> made_on) {
  std::vector<std::shared_ptr<Tape>> found;
  const std::lock_guard lock(tapes_mutex_);
  for (const ThreadsTape& each : tapes_) {
    if (std::shared_ptr<Tape> tape = each.tape.lock(); tape != nullptr && (!made_on || each.thread == *made_on)) {
      found.push_back(std::move(tape));
    }
  }
  return found;
}

void Core::make_room_on_device() {
  stash_.drain();
  std::ranges::for_each(tapes(), &Tape::drop_guesses);
}

std::optional<Kept> Core::passed_through(const at::Tensor& tensor) {
  const std::optional<Kept> never_moved = exclusions_.reason(tensor);
  return never_moved || storage_bytes(tensor) >= least_bytes_ ? never_moved : Kept::kPolicy;
}

bool Core::backward_begins(Tape& tape) {
  const bool others_in_use = std::ranges::any_of(tapes(std::this_thread::get_id()), &Tape::in_use);
  if (planning_ == nullptr) {
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

void Core::count_kept(Kept reason, const at::Tensor& tensor) {
  const std::uint64_t bytes = reason == Kept::kUnmovable ? 0 : storage_bytes(tensor);
  counters_.saved.add(bytes);
  counters_.kept[static_cast<std::size_t>(reason)].add(bytes);
}

void Core::count_offloaded(std::uint64_t bytes) {
  counters_.offloaded.add(bytes);
  if (debug_log_wanted()) {
    log_debug("offload " + human_bytes(bytes));
  }
}

void Core::count_dropped(std::uint64_t bytes) {
  counters_.dropped.add(bytes);
  if (debug_log_wanted()) {
    log_debug("drop " + human_bytes(bytes));
  }
}

void Core::count_kept(Kept reason, std::uint64_t bytes) {
  counters_.kept[static_cast<std::size_t>(reason)].add(bytes);
  if (debug_log_wanted()) {
    log_debug("keep " + human_bytes(bytes) + ": " + std::string(to_string(reason)));
  }
}

std::shared_ptr<SavedStorage> Core::save(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape, Start start) {
  const c10::Storage& storage = tensor.storage();
  const std::uint64_t bytes = storage.nbytes();
  bool inserted = false;
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  std::shared_ptr<SavedStorage> saved = table_.find_or_insert(
      storage, VersionId(version),
      [&] { return make_shared_unless_forked<SavedStorage>(shared_from_this(), tape, storage, version); }, inserted);
  if (inserted) {
    place(saved, tensor, *tape, start);
  } else {
    counters_.deduplicated.add(bytes);
  }
  counters_.saved.add(bytes);
  return saved;
}

void Core::place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, Tape& tape, Start start) {
  const std::uint64_t bytes = saved->bytes();
  std::unique_ptr<Recipe> recipe = policy_needs_recompute_ ? Recipe::find(tensor) : nullptr;
  const auto [decision, ordinal] = decide(tensor, *saved, tape, recipe.get());
  if (planning_ != nullptr && tape.plan() != nullptr) {
    const std::shared_ptr<StepRecorder> recorder = tape.recorder();
    const StepRecorder::Detour detour(recorder.get());
    stash_.shrink_to(stash_limit(tape, ordinal));
  }
  if (decision == Decision::kRecompute && recipe != nullptr) {
    count_dropped(bytes);
    saved->drop(std::move(recipe));
    return;
  }
  if (decision != Decision::kOffload) {
    saved->stays();
    count_kept(Kept::kPolicy, bytes);
    return;
  }
  check_window(bytes);
  std::optional<Block> block = tier_->try_acquire(bytes);
  warn_if_host_memory_is_short(/*refused=*/!block);
  if (!block) {
    saved->stays();
    count_kept(Kept::kNoRoom, bytes);
    if (planning_ != nullptr && tape.plan() != nullptr && !warned_of_no_room_.exchange(true)) {
      log_warning("a plan has " + human_bytes(bytes) +
                  " away that find no room in host memory or on disk: they stay, and Options::device_budget may be "
                  "exceeded");
    }
    return;
  }
  if (start == Start::kNow) {
    saved->send_out(*std::move(block), tier_->current_stream());
  } else {
    saved->stays();
    saved->send_out_later(*std::move(block), tier_->current_stream());
    PutOff::of_this_thread().add(saved);
  }
}

Core::Decided Core::decide(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const Recipe* recipe) {
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
  candidate.ordinal = tape.next_candidate();
  if (candidate.ordinal == 0) {
    if (book_->take_dropped()) {
      options_.policy->drop_step();
    }
    options_.policy->begin_step();
    ++counters_.steps;
    if (planning_ != nullptr) {
      planning_->step_begun(tape);
    }
  }
  const Decision decision = options_.policy->decide(candidate);
  if (planning_ != nullptr) {
    planning_->decided(tape);
    enter_step(tensor, saved, tape, recipe, candidate);
  }
  return {decision, static_cast<std::uint32_t>(candidate.ordinal)};
}

void Core::enter_step(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const Recipe* recipe,
                      const Candidate& candidate) {
  const std::shared_ptr<StepRecorder> recorder = tape.recorder();
  std::uint32_t index = 0;
  if (recorder != nullptr) {
    index = recorder->saved(tensor.storage(), candidate.recompute, inputs_in(*recorder, recipe));
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

// Reading the kernel's figures takes tens of microseconds, so only when the pool has grown or could not.
void Core::warn_if_host_memory_is_short(bool refused) {
  const PoolStats pool = tier_->pool_stats();
  if ((growths_seen_.exchange(pool.growths) == pool.growths && !refused) || warned_of_host_memory_) {
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
              (tier_->device().is_cpu() ? " of disk" : " of it") + ". Options::capacity_bytes bounds that.");
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

c10::DataPtr Core::counted(c10::DataPtr memory, std::size_t bytes) {
  struct Counted {
    DeviceAccount::Held on_device;  // until the memory is freed
    c10::DataPtr memory;
  };
  void* const data = memory.get();
  const c10::Device device = memory.device();
  auto* const counted = new Counted{{account_, bytes}, std::move(memory)};
  return {data, counted, [](void* context) { delete static_cast<Counted*>(context); }, device};
}

Stats Core::stats() {
  stash_.sweep();  // what is over is not held
  Stats stats;
  stats.saved = counters_.saved.count();
  stats.offloaded = counters_.offloaded.count();
  stats.dropped = counters_.dropped.count();
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
  return stats;
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
  const std::lock_guard lock(reset_mutex_);
  stalls_at_reset_ = tier_->stall_stats();
}

}  // namespace ebb
