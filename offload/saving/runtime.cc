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

void run_for_its_time(Recipe& recipe) noexcept {
  try {
    static_cast<void>(recipe.run());
  } catch (const std::exception&) {
    log_warning("a recipe could not be run for its time, so that the plan takes it for quick");
  }
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
  Placement placement{.saved = saved};
  placement.decided = decider_.decide(tensor, *saved, step, make_recipe, [&](const LogRecipe::Root& root) {
    return save_value(root, step, /*nested=*/0, placement.values);
  });
  carry_out(std::move(placement), step, is_filled, /*is_value=*/false);
}

// Saves a value of the calling thread's log that autograd does not save.
std::shared_ptr<SavedStorage> Runtime::save_value(const LogRecipe::Root& root, SavedStep& step, int nested,
                                                  std::vector<Placement>& values) {
  OperationLog& log = *OperationLog::here();
  const c10::VariableVersion& counter = log.value(root.value)->counter;
  const auto [saved, is_new] = steps_.table().find_or_insert(root.storage, VersionId(counter), [&] {
    return make_shared_unless_forked<SavedStorage>(shared_residency(), steps_, step.shared_from_this(), root.storage,
                                                   counter, /*is_of_region=*/false);
  });
  Placement placement{.saved = saved};
  if (is_new) {
    residency_.ledger().counters().saved.add(saved->bytes());
    log.before_write(root.value, [entered = std::weak_ptr(saved)] {
      if (const std::shared_ptr<SavedStorage> saved = entered.lock()) {
        saved->part_from_source([](const c10::Storage& source) { return copy_of(source); });
      }
    });
    constexpr int kMostNested = 4;  // a search is for each of them
    LogRecipe::SaveValue save;      // empty: the value gets no recipe of its own
    if (nested < kMostNested) {
      save = [&](const LogRecipe::Root& of_value) { return save_value(of_value, step, nested + 1, placement.values); };
    }
    placement.decided = decider_.decide_about_value(root, saved, step, save);
    if (exclusions_.contains(root.storage)) {
      placement.decided->decision = Decision::kKeep;
    }
  }
  values.push_back(std::move(placement));
  return saved;
}

void Runtime::carry_out(Placement placement, SavedStep& step, bool is_filled, bool is_value) {
  if (!placement.decided) {
    return;
  }
  auto& [decision, found] = *placement.decided;
  const bool is_dropped = decision == Decision::kRecompute && found.is_proven;
  if (is_dropped) {
    found.recipe->settle();
  }
  // A step that is recorded drops all that it may, but for recipes that would run too deep. A plan may have fewer of
  // them run one inside the other, so their time is taken, too.
  const bool is_recorded = step.recorder() != nullptr;
  const bool is_run_beside = found.recipe != nullptr && !is_dropped &&
                             (!found.is_proven || (is_recorded && found.recipe->depth() > kMaxRecipeDepth)) &&
                             settled(*found.recipe);
  if (!is_dropped && !is_run_beside) {
    // A step that is recorded, in which all moves, has the values for as long as a recipe would need them.
    std::erase_if(placement.values, [&](const Placement& each) {
      return !is_recorded || !each.decided || each.decided->decision == Decision::kKeep;
    });
  }
  std::vector<std::shared_ptr<SavedStorage>> values;
  for (Placement& each : placement.values) {
    values.push_back(each.saved);
    carry_out(std::move(each), step, /*is_filled=*/true, /*is_value=*/true);
  }
  const std::shared_ptr<SavedStorage>& saved = placement.saved;
  if (is_dropped) {
    drop(saved, std::move(found.recipe));
    return;
  }
  if (is_run_beside) {
    const auto run = [runtime = shared_from_this(), proof = found.proof, is_proven = found.is_proven,
                      recipe = std::shared_ptr(std::move(found.recipe))](const c10::Storage& there) {
      if (is_proven) {
        run_for_its_time(*recipe);
      } else {
        runtime->decider_.prove(proof, *recipe, there);
      }
    };
    saved->at_first_use(run, /*by_recipes=*/is_value);
  } else if (!values.empty()) {
    saved->at_first_use([held = std::move(values)](const c10::Storage& /*there*/) {}, /*by_recipes=*/is_value);
  }
  put(saved, decision, step, is_filled);
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
