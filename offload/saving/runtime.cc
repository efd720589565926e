#include "offload/saving/runtime.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include <c10/util/ScopeExit.h>

#include "offload/base/backward_pass.h"
#include "offload/base/human_bytes.h"
#include "offload/base/interpreter.h"
#include "offload/base/log.h"
#include "offload/plans/plan_follower.h"
#include "offload/recompute/operation_log.h"
#include "offload/recording/step_recorder.h"
#include "offload/tensors/deferred_copies.h"
#include "offload/tensors/lent_tensor.h"
#include "streams/base/system_memory.h"

namespace ebb {
namespace {

// A recipe that is only to be proven is not worth an error of the program's.
bool settled(Recipe& recipe) {
  try {
    recipe.settle();
    return true;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
}

// Without that time the step gives no record.
void run_for_its_time(Recipe& recipe, StepRecorder& recorder) noexcept {
  try {
    static_cast<void>(recipe.run());
  } catch (...) {
    recorder.disturb();
  }
}

// How many recipes run one inside the other to make again what this is decided about.
int depth_of(const Decider::Decided& decided) {
  const auto& [decision, found] = decided;
  return decision == Decision::kRecompute && found.is_proven ? found.recipe->depth() : 0;
}

}  // namespace

Runtime::Runtime(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace)
    : options_(std::move(options)),
      steps_({.planned = options_.device_budget.has_value(),
              .stash_bytes = options_.stash_bytes,
              .window_bytes = options_.window_bytes}),
      residency_(options_.record_timeline, std::move(tier), std::move(trace)),
      decider_(options_, steps_, residency_),
      exclusions_(residency_.tier().device(), decider_.least_bytes()) {}

std::optional<DeviceAccount::Held> Runtime::pass_through(const at::Tensor& tensor, KeptReason reason) {
  const bool has_bytes = reason != KeptReason::kUnmovable && tensor.has_storage();
  const std::uint64_t bytes = has_bytes ? tensor.storage().nbytes() : 0;
  Ledger& ledger = residency_.ledger();
  ledger.expect_request(bytes);
  ledger.counters().saved.add(bytes);
  ledger.counters().kept[static_cast<std::size_t>(reason)].add(bytes);
  if (reason != KeptReason::kPolicy) {
    return std::nullopt;
  }
  using What = DeviceAccount::Held::What;
  return ledger.hold(bytes, plans() == nullptr ? What::kPassedThrough : What::kPassedThroughBesidePlan);
}

std::shared_ptr<SavedStorage> Runtime::save(const at::Tensor& tensor, const std::shared_ptr<SavedStep>& step,
                                            bool is_filled, MakeRecipe make_recipe) {
  Counters& counters = residency_.ledger().counters();
  const c10::Storage& storage = tensor.storage();
  residency_.ledger().expect_request(storage.nbytes());
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const VersionId version(counter);
  const auto [saved, is_new] = steps_.table().find_or_insert(storage, version, [&] {
    return make_shared_unless_forked<SavedStorage>(shared_residency(), steps_, step, storage, counter,
                                                   make_recipe != nullptr);
  });
  if (is_new) {
    OperationLog* const log = decider_.needs_recipes() && !in_backward() ? OperationLog::here() : nullptr;
    if (log != nullptr && log->is_open()) {  // Note [What is an operation] in operation_log.h
      log->at_end([runtime = shared_from_this(), entered = std::weak_ptr(saved), tensor, step, version,
                   make_recipe = std::move(make_recipe)](bool failed) {
        const WithoutInterpreterLock without;
        const std::shared_ptr<SavedStorage> saved = entered.lock();
        if (saved == nullptr) {
          return;
        }
        if (!failed && version == VersionId(tensor.unsafeGetTensorImpl()->version_counter())) {
          runtime->place_or_keep(saved, tensor, *step, /*is_filled=*/true, make_recipe);
        } else {  // written to by the operation itself
          runtime->stay(*saved, KeptReason::kDeferred);
        }
      });
    } else {
      place_or_keep(saved, tensor, *step, is_filled, make_recipe);
    }
  } else {
    counters.deduplicated.add(saved->bytes());
  }
  counters.saved.add(saved->bytes());
  return saved;
}

void Runtime::place_or_keep(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, SavedStep& step,
                            bool is_filled, const MakeRecipe& make_recipe) {
  auto failed = c10::make_scope_exit([&saved] { saved->stays(); });  // another thread may share the storage
  place(saved, tensor, step, is_filled, make_recipe);
  failed.release();
}

void Runtime::stay(SavedStorage& saved, KeptReason reason) {
  saved.stays();
  residency_.ledger().count_kept(reason, saved.bytes());
  if (reason == KeptReason::kPolicy && options_.evict_when_out_of_memory) {
    saved.may_be_evicted(tier().current_stream());
  }
}

void Runtime::place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, SavedStep& step,
                    bool is_filled, const MakeRecipe& make_recipe) {
  std::vector<Placement> placements;
  Decider::Decided decided =
      decider_.decide(tensor, saved, step, make_recipe, [&](const LogRecipe::Root& root, std::uint64_t place) {
        return save_value(root, place, step, /*nested=*/0, placements);
      });
  placements.push_back({.saved = saved, .decided = std::move(decided)});
  carry_out(std::move(placements), step, is_filled);
}

// Saves a value of the calling thread's log that autograd does not save.
LogRecipe::SavedValue Runtime::save_value(const LogRecipe::Root& root, std::uint64_t place, SavedStep& step, int nested,
                                          std::vector<Placement>& placements) {
  OperationLog& log = *OperationLog::here();
  const c10::VariableVersion& counter = log.value(root.value)->counter;
  const auto [saved, is_new] = steps_.table().find_or_insert(root.storage, VersionId(counter), [&] {
    return make_shared_unless_forked<SavedStorage>(shared_residency(), steps_, step.shared_from_this(), root.storage,
                                                   counter, /*is_of_region=*/false);
  });
  if (!is_new) {
    const auto here = std::ranges::find(placements, saved, &Placement::saved);
    return {saved, here == placements.end() ? saved->recipe_depth() : depth_of(here->decided)};
  }
  residency_.ledger().counters().saved.add(saved->bytes());
  log.before_write(root.value, [entered = std::weak_ptr(saved), counter, was = root.version_was](bool is_seen) {
    const std::shared_ptr<SavedStorage> saved = entered.lock();
    // Else backward raises the error for the write, or for memory that was taken.
    const bool is_as_saved = saved != nullptr && counter.current_version() == was && !saved->source_has_changed();
    if (is_as_saved && (is_seen || saved->is_held_by_program())) {
      saved->part_from_source([](const c10::Storage& source) { return copy_of(source); });
    }
  });
  constexpr int kMostNested = 4;  // a search is for each of them
  const bool is_excluded = exclusions_.contains(root.storage);
  Decider::Decided decided =
      decider_.decide_about_value(root, saved, step, place, /*may_be_made=*/nested < kMostNested && !is_excluded,
                                  [&](const LogRecipe::Root& of_value, std::uint64_t its_place) {
                                    return save_value(of_value, its_place, step, nested + 1, placements);
                                  });
  decided.decision = is_excluded ? Decision::kKeep : decided.decision;
  const int depth = depth_of(decided);
  placements.push_back({.saved = saved, .decided = std::move(decided), .is_value = true});
  return {saved, depth};
}

// `placements`: of a save, which is the last, and of what recipes begin from, each before the recipes.
void Runtime::carry_out(std::vector<Placement> placements, SavedStep& step, bool is_filled) {
  // A step that is recorded drops all that it may, but for recipes that would run too deep. A plan may have fewer of
  // them run one inside the other, so their time is taken, too.
  const bool is_recorded = step.recorder() != nullptr && step.plan() == nullptr;
  std::vector<std::shared_ptr<SavedStorage>> held;
  for (auto each = placements.rbegin(); each != placements.rend(); ++each) {
    auto& [decision, found] = each->decided;
    if (each->is_value && each->saved.use_count() == 1) {  // of no recipe that may run
      // A step that is recorded, in which all moves, has the values for as long as a recipe would need them.
      if (!is_recorded || decision == Decision::kKeep) {
        *each = {};
        continue;
      }
      held.push_back(each->saved);
    }
    each->is_dropped = decision == Decision::kRecompute && found.is_proven && !found.recipe->is_too_deep();
    const bool may_run_beside = found.recipe != nullptr && !each->is_dropped &&
                                (!found.is_proven || (is_recorded && found.recipe->is_too_deep()));
    each->is_run_beside = may_run_beside && settled(*found.recipe);
    if (!each->is_dropped && !each->is_run_beside) {
      found.recipe = nullptr;
    }
  }
  for (Placement& each : placements) {
    if (each.saved == nullptr) {
      continue;
    }
    if (each.is_dropped) {
      each.decided.found.recipe->settle();
      drop(each.saved, std::move(each.decided.found.recipe));
      continue;
    }
    if (each.is_run_beside) {
      run_beside(each, step);
    } else if (!each.is_value && !held.empty()) {
      each.saved->at_first_use([held = std::move(held)](const c10::Storage& /*there*/) {}, /*by_recipes=*/false);
    }
    put(each.saved, each.decided.decision, step, each.is_value || is_filled);
  }
}

// Has the recipe run where backward first gets the bytes: to be proven, or for its time.
void Runtime::run_beside(Placement& placement, SavedStep& step) {
  auto& found = placement.decided.found;
  const std::shared_ptr recipe = std::move(found.recipe);
  if (found.is_proven) {
    placement.saved->at_first_use(
        [recipe, recorder = step.recorder()](const c10::Storage& /*there*/) { run_for_its_time(*recipe, *recorder); },
        placement.is_value);
  } else {
    placement.saved->at_first_use([runtime = shared_from_this(), proof = found.proof, recipe](
                                      const c10::Storage& there) { runtime->decider_.prove(proof, *recipe, there); },
                                  placement.is_value);
  }
}

void Runtime::put(const std::shared_ptr<SavedStorage>& saved, Decision decision, SavedStep& step, bool is_filled) {
  const std::uint64_t bytes = saved->bytes();
  if (decision != Decision::kOffload) {
    stay(*saved, KeptReason::kPolicy);
    return;
  }
  TORCH_CHECK(!options_.window_bytes || bytes <= *options_.window_bytes, "ebb: Options::window_bytes is ",
              human_bytes(options_.window_bytes.value_or(0)), ", but a tensor to offload has ", human_bytes(bytes),
              ": it could never be prefetched. Set the window to at least the largest tensor's bytes, or keep such "
              "tensors by a policy or a NoOpGuard.");
  std::optional<Block> block = tier().try_acquire(bytes);
  warn_if_host_memory_is_short();
  if (!block) {
    stay(*saved, KeptReason::kNoRoom);
    if (plans() != nullptr) {
      plans()->found_no_room(step, bytes);
    }
    return;
  }
  if (is_filled) {
    saved->offload(*std::move(block), tier().current_stream());
  } else {
    saved->stays();
    saved->defer_offload(*std::move(block), tier().current_stream());
    DeferredCopies::of_this_thread().add(saved);
  }
}

void Runtime::drop(const std::shared_ptr<SavedStorage>& saved, std::unique_ptr<Recipe> recipe) {
  const auto held = std::make_shared<std::unique_ptr<Recipe>>(std::move(recipe));
  const auto let_go = [this, saved, held] {
    residency_.ledger().count_dropped(saved->bytes());
    saved->drop(std::move(*held));
  };
  const bool is_later = (*held)->at_end([runtime = shared_from_this(), saved, let_go](bool may_run) {
    if (may_run) {
      let_go();
    } else {
      runtime->stay(*saved, KeptReason::kPolicy);
    }
  });
  if (!is_later) {
    let_go();
  }
}

std::shared_ptr<ManagedSet> Runtime::managed(const Parameters& how) {
  const MutexLock lock(making_managed_mutex_);
  std::shared_ptr<ManagedSet> set = managed();
  if (set == nullptr) {
    is_bound_planned_ = plans() != nullptr && !how.device_bytes;
    const std::optional<std::uint64_t> bytes = is_bound_planned_ ? plans()->first_managed_bytes() : how.device_bytes;
    if (!bytes) {
      throw std::invalid_argument(
          "ebb: Parameters::device_bytes is not set, and Options::device_budget is neither bytes nor a share of free "
          "memory: say how many bytes of managed tensors may be on the device");
    }
    set = std::make_shared<ManagedSet>(shared_residency(), steps_,
                                       ManagedSet::Limits{.device_bytes = *bytes,
                                                          .prefetch_bytes = how.prefetch_bytes,
                                                          .minimum_bytes = how.minimum_bytes,
                                                          .resident_bytes = how.resident_bytes,
                                                          .states = how.states});
    serve(set);
  }
  if (is_bound_planned_) {
    plans()->plans_bound_of(set);
  }
  return set;
}

void Runtime::serve(std::weak_ptr<ManagedSet> set) {
  const MutexLock lock(managed_mutex_);
  managed_ = std::move(set);
}

std::shared_ptr<ManagedSet> Runtime::managed() {
  const MutexLock lock(managed_mutex_);
  return managed_.lock();
}

Stats Runtime::stats() {
  Stats stats = residency().stats();
  stats.stash.capacity_bytes = steps_.stash_limit();
  stats.window.capacity_bytes = steps_.window_limit();
  if (const std::shared_ptr<ManagedSet> set = managed()) {
    set->add_to(stats);
  }
  return stats;
}

void Runtime::reset_stats() { residency().reset_stats(); }

std::uint64_t Runtime::evictable_bytes() {
  const std::shared_ptr<ManagedSet> managed = this->managed();
  return residency_.ledger().account()->storages_bytes() + (managed == nullptr ? 0 : managed->held_bytes());
}

std::uint64_t Runtime::evict(std::uint64_t bytes) noexcept {
  if (Prefetching::is_here()) {
    return 0;
  }
  DeviceAccount& account = *residency_.ledger().account();
  const std::shared_ptr<ManagedSet> managed = this->managed();
  const auto held = [&] { return account.held.now_bytes() + (managed == nullptr ? 0 : managed->held_bytes()); };
  const std::uint64_t before = held();
  const auto gone = [&] { return before - std::min(before, held()); };
  const auto enough = [&] { return gone() >= bytes; };
  try {
    free_unused_lent();
    residency_.stash().drain();
    if (enough()) {
      return gone();
    }
    ++account.evictions;
    steps_.make_room(enough);
    if (managed != nullptr) {
      managed->let_go(enough);
    }
    steps_.evict(enough);
  } catch (...) {
    log_warning("a tensor that was kept could not be moved to make room on the device");
  }
  return gone();
}

// Reads the kernel's figures only when the pool has asked the system for more memory, because reading takes tens of
// microseconds.
void Runtime::warn_if_host_memory_is_short() {
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
              (tier().device().is_cpu() ? " of disk" : " of it") + ". Options::capacity_bytes bounds what saves hold.");
}

}  // namespace ebb
