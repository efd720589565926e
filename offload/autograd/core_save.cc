#include "offload/autograd/core.h"

#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>

#include "offload/autograd/region_saves.h"
#include "offload/base/log.h"
#include "offload/planning/step_recorder.h"
#include "offload/recompute/graph_recipe.h"
#include "offload/tensors/put_off.h"
#include "streams/base/system_memory.h"

// What becomes of a save; core.cc has the rest.
namespace ebb {
namespace {

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

std::shared_ptr<SavedStorage> Core::save(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape, Start start) {
  const c10::Storage& storage = tensor.storage();
  const std::uint64_t bytes = storage.nbytes();
  bool inserted = false;
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  std::shared_ptr<SavedStorage> saved = residency_.table().find_or_insert(
      storage, VersionId(version),
      [&] { return make_shared_unless_forked<SavedStorage>(shared_residency(), tape, storage, version); }, inserted);
  residency_.ledger().expect_request(bytes);
  if (inserted) {
    place(saved, tensor, *tape, start);
  } else {
    residency_.ledger().counters().deduplicated.add(bytes);
  }
  residency_.ledger().counters().saved.add(bytes);
  return saved;
}

std::shared_ptr<SavedStorage> Core::keep(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                                         RegionSaves& region) {
  const c10::Storage& storage = tensor.storage();
  const std::uint64_t bytes = storage.nbytes();
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  residency_.ledger().expect_request(bytes);
  residency_.ledger().counters().saved.add(bytes);
  bool inserted = false;
  std::shared_ptr<SavedStorage> saved = residency_.table().find(storage, VersionId(version));
  if (saved == nullptr) {
    saved = region.table.find_or_insert(
        storage, VersionId(version),
        [&] { return make_shared_unless_forked<SavedStorage>(shared_residency(), tape, storage, version); }, inserted);
  }
  if (!inserted) {
    residency_.ledger().counters().deduplicated.add(bytes);
    return saved;
  }
  tape->began();
  saved->enter_step(region.ordinal, nullptr, 0);
  residency_.ledger().count_kept(Kept::kPolicy, bytes);
  if (options_.evict_when_out_of_memory) {
    saved->may_be_evicted(tier().current_stream());
  }
  return saved;
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
    saved->stays();
    residency_.ledger().count_kept(Kept::kPolicy, bytes);
    if (options_.evict_when_out_of_memory) {
      saved->may_be_evicted(tier().current_stream());
    }
    return;
  }
  check_window(bytes);
  std::optional<Block> block = tier().try_acquire(bytes);
  warn_if_host_memory_is_short();
  if (!block) {
    saved->stays();
    residency_.ledger().count_kept(Kept::kNoRoom, bytes);
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
      tape.follow(plan);
      if (auto recorder = planning_->follows(plan)) {
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
  const std::optional<RegionsPlace> place = [&] {
    const std::lock_guard lock(policy_mutex_);
    return ask_for_region(candidate, inputs, tape);
  }();
  shrink_stash(tape, static_cast<std::uint32_t>(candidate.ordinal));
  return place;
}

// LOCK: policy_mutex_
Core::RegionsPlace Core::ask_for_region(Candidate& candidate, const std::vector<at::Tensor>& inputs, Tape& tape) {
  auto ended = c10::make_scope_exit([&tape] { tape.ended(); });  // for one that the policy refuses
  RegionsPlace place{ask(candidate, tape) == Decision::kKeep, tape.recorder(), 0,
                     static_cast<std::uint32_t>(candidate.ordinal)};
  if (place.recorder != nullptr) {
    std::vector<std::uint32_t> indices;
    for (const at::Tensor& input : inputs) {
      const std::shared_ptr<SavedStorage> saved =
          input.defined() && input.has_storage()
              ? residency_.table().find(input.storage(), VersionId(input.unsafeGetTensorImpl()->version_counter()))
              : nullptr;
      if (const auto index = saved == nullptr ? std::nullopt : saved->index_in(*place.recorder)) {
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
