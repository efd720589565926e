#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "offload/accounts/device_account.h"
#include "offload/cache/residency.h"
#include "offload/managed/managed_set.h"
#include "offload/options.h"
#include "offload/parameters.h"
#include "offload/saving/decider.h"
#include "offload/saving/exclusions.h"
#include "offload/steps/saved_storage.h"
#include "offload/steps/steps.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"

namespace ebb {

// What an Offloader owns, and what the saves made under its guards keep alive after the Offloader: the decider, the
// steps, and the residency of their storages. A Runtime is always held by a std::shared_ptr, which
// make_shared_unless_forked makes if the process may fork.
//
// Threads: every member may be called from any thread.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  // `options` must be valid, with device filled in. `trace`: as it was given to the tier; null for none.
  Runtime(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace = nullptr);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  [[nodiscard]] Steps& steps() { return steps_; }
  [[nodiscard]] Residency& residency() { return residency_; }
  [[nodiscard]] Decider& decider() { return decider_; }
  [[nodiscard]] PlanFollower* plans() { return decider_.plans(); }
  [[nodiscard]] Exclusions& exclusions() { return exclusions_; }

  // The pointer keeps the whole Runtime alive.
  [[nodiscard]] std::shared_ptr<Residency> shared_residency() { return {shared_from_this(), &residency_}; }

  void check_process() const { residency_.check_process(); }
  [[nodiscard]] bool forked() const noexcept { return residency_.forked(); }
  [[nodiscard]] Tier& tier() { return residency_.tier(); }

  // Whether LibTorch's allocator is to ask for memory: Note [Out of memory] in out_of_memory.h.
  [[nodiscard]] bool serves_allocator() { return options_.evict_when_out_of_memory && tier().device().is_cuda(); }

  // The managed storages. Their limits are those of the first call as long as any of its storages lives. Throws
  // std::invalid_argument where nobody says how much of the device they may have.
  [[nodiscard]] std::shared_ptr<ManagedSet> managed(const Parameters& how);
  [[nodiscard]] std::shared_ptr<ManagedSet> managed();  // null where there is none

  // Has evictions ask this set, too, as long as it lives.
  void serve(std::weak_ptr<ManagedSet> set);

  // Lets go of at least `bytes` of device memory, as far as possible: first the stash is emptied, for whose copies the
  // streams wait, and on a CPU the caller, then unclaimed prefetches are cancelled, then managed storages leave, whose
  // bytes mostly have a home already, and then storages that the policy has kept are evicted. Returns how many bytes
  // were let go. Waits for no lock under which device memory is asked for, because the caller may hold the device
  // allocator's lock. Does nothing inside of a Prefetching.
  std::uint64_t evict(std::uint64_t bytes) noexcept;

  // How many bytes evict() could let go at most.
  [[nodiscard]] std::uint64_t evictable_bytes();

  // All counts, those of the managed storages, too.
  [[nodiscard]] Stats stats();
  void reset_stats();

  // Counts a save that passes through. Where the policy had it pass, the result counts the bytes as held on the device
  // until the save ends; else nullopt. `tensor` need not have a storage.
  [[nodiscard]] std::optional<DeviceAccount::Held> pass_through(const at::Tensor& tensor, KeptReason reason);

  // Saves a movable tensor's storage: finds the SavedStorage of this version, or makes one and has the decider decide.
  // Throws what the decider throws, c10::Error for a storage larger than Options::window_bytes, and what the tier
  // throws if it cannot start the copy out. After an exception the save is as if it had not been made.
  //
  // `is_filled`: false where the operation that saves the tensor may fill the tensor afterwards. A copy then starts
  // once the operation is over (Note [Saved before it is filled] in deferred_copies.h).
  //
  // `make_recipe`: as for Decider::decide.
  [[nodiscard]] std::shared_ptr<SavedStorage> save(const at::Tensor& tensor, const std::shared_ptr<SavedStep>& step,
                                                   bool is_filled = true, MakeRecipe make_recipe = nullptr);

 private:
  void stay(SavedStorage& saved, KeptReason reason);
  void place_or_keep(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, SavedStep& step,
                     bool is_filled, const MakeRecipe& make_recipe);
  void place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, SavedStep& step, bool is_filled,
             const MakeRecipe& make_recipe);
  // What becomes of a storage.
  struct Placement {
    std::shared_ptr<SavedStorage> saved;
    Decider::Decided decided;
    bool is_value = false;  // that autograd does not save

    // Of carry_out().
    bool is_dropped = false;
    bool is_run_beside = false;
  };
  [[nodiscard]] LogRecipe::SavedValue save_value(const LogRecipe::Root& root, std::uint64_t place, SavedStep& step,
                                                 int nested, std::vector<Placement>& placements);
  void carry_out(std::vector<Placement> placements, SavedStep& step, bool is_filled);
  void run_beside(Placement& placement, SavedStep& step);
  void drop(const std::shared_ptr<SavedStorage>& saved, std::unique_ptr<Recipe> recipe);
  void put(const std::shared_ptr<SavedStorage>& saved, Decision decision, SavedStep& step, bool is_filled);
  void warn_if_host_memory_is_short();

  const Options options_;
  Steps steps_;
  Residency residency_;
  Decider decider_;
  Exclusions exclusions_;

  // Weak, because a ManagedSet keeps the whole Runtime alive; managed tensors keep the set.
  Mutex making_managed_mutex_ EBB_ACQUIRED_BEFORE(managed_mutex_);  // held over making the set
  bool is_bound_planned_ EBB_GUARDED_BY(making_managed_mutex_) = false;
  Mutex managed_mutex_;  // held over nothing: evict() takes it
  std::weak_ptr<ManagedSet> managed_ EBB_GUARDED_BY(managed_mutex_);

  std::atomic<std::uint64_t> asked_system_{0};
  std::atomic<bool> warned_of_host_memory_{false};
};

}  // namespace ebb
