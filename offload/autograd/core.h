#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>

#include "offload/autograd/exclusions.h"
#include "offload/options.h"
#include "offload/planning/planning.h"
#include "offload/report/device_account.h"
#include "offload/report/timeline.h"
#include "offload/residency/residency.h"
#include "offload/residency/saved_storage.h"
#include "offload/residency/tape.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"

namespace ebb {

class GraphRecipe;
struct RegionSaves;

// What an Offloader owns, and what the saves made under its guards keep alive after it. Always held by a
// std::shared_ptr; one made by make_shared_unless_forked if the process may fork.
//
// Threads: every member may be called from any thread.
class Core : public std::enable_shared_from_this<Core> {
 public:
  // `options` must be valid, with device and policy filled in.
  // `trace`: as it was given to the tier; null for none. `planned`: Options::policy, where a budget is set; else null.
  Core(Options options, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace = nullptr,
       std::shared_ptr<Planned> planned = nullptr);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // What the offloader's storages share. The pointer keeps all of this alive.
  [[nodiscard]] Residency& residency() { return residency_; }
  [[nodiscard]] std::shared_ptr<Residency> shared_residency() { return {shared_from_this(), &residency_}; }

  void check_process() const { residency_.check_process(); }
  [[nodiscard]] bool forked() const noexcept { return residency_.forked(); }
  [[nodiscard]] Tier& tier() { return residency_.tier(); }
  [[nodiscard]] Trace* trace() { return residency_.trace(); }  // null for none

  // The step that saves made on this thread now belong to: its present one, or a new one if backward has begun on that.
  // The thread's earlier steps then give up what they have fetched ahead.
  [[nodiscard]] std::shared_ptr<Tape> tape_of_this_thread();

  // Why a save of `tensor` is passed through; nullopt where its storage may move.
  [[nodiscard]] std::optional<Kept> passed_through(const at::Tensor& tensor);

  // A backward begins on this thread, probably on this step. With a plan, the streams wait for copies out as it says.
  // Returns whether the first copies in should start at once: never while another of the thread's steps is in use,
  // whose window they would take.
  [[nodiscard]] bool backward_begins(Tape& tape);
  void guessed_wrong() { residency_.stall_watch().guessed_wrong(); }

  // The backward pass on `tape` is over; `failed`: by an exception. A step that is recorded waits for the device here.
  void backward_is_over(Tape& tape, bool failed);

  [[nodiscard]] std::string explain();
  [[nodiscard]] std::optional<PlanReport> plan_report();

  // Counts a save that passes through. `tensor` need not have a storage.
  void count_kept(Kept reason, const at::Tensor& tensor);

  // Counts bytes of a save that is passed through as held on the device until the result is destroyed, which may be
  // after this.
  [[nodiscard]] DeviceAccount::Held hold_passed_through(std::uint64_t bytes) {
    using What = DeviceAccount::Held::What;
    return {residency_.ledger().account(), bytes,
            planning_ == nullptr ? What::kPassedThrough : What::kPassedThroughBesidePlan};
  }

  // When the copy of a newly saved storage starts.
  enum class Start : std::uint8_t {
    kNow,
    kWhenFilled,  // the operation that saves it may have yet to fill it: Note [Saved before it is filled] in put_off.h
  };

  // Saves a movable tensor's storage: finds the copy that exists, or asks the policy and starts one.
  // Throws what the policy throws, c10::Error for a storage larger than a window that was set, and what the tier throws
  // that cannot start the copy. The save is then as if it had not been made.
  [[nodiscard]] std::shared_ptr<SavedStorage> save(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                                                   Start start = Start::kNow);

  // The same for one that stays without the policy being asked, unless it is saved already: `region` has those of the
  // checkpointed region that runs. They are unknown outside of it, where the policy is asked as if it had run again.
  [[nodiscard]] std::shared_ptr<SavedStorage> keep(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                                                   RegionSaves& region);

  // A checkpointed region begins, which has saved these inputs; asks the policy, if that plans. nullopt: it does not.
  struct RegionsPlace {
    bool stays;                              // what the region saves
    std::shared_ptr<StepRecorder> recorder;  // of the step; null for none
    std::uint32_t index;                     // in its record
    std::uint32_t ordinal;                   // as Candidate::ordinal
  };
  [[nodiscard]] std::optional<RegionsPlace> region_begins(const std::vector<at::Tensor>& inputs, Tape& tape);

  [[nodiscard]] Exclusions& exclusions() { return exclusions_; }
  [[nodiscard]] std::vector<TraceSpan> take_trace();
  [[nodiscard]] Timeline& timeline() { return residency_.ledger().account()->timeline; }

  [[nodiscard]] Stats stats();
  void log_summary() noexcept;  // at the Offloader's end
  void reset_stats();

 private:
  struct Entry {
    std::shared_ptr<SavedStorage> saved;
    bool is_new = false;
  };
  Entry enter(StorageTable& table, const at::Tensor& tensor, const std::shared_ptr<Tape>& tape);
  void count_save(const SavedStorage& saved, bool is_new);
  void stay(SavedStorage& saved, Kept reason);

  struct Decided {
    Decision decision;
    std::uint32_t ordinal;  // as Candidate::ordinal
  };
  Decided decide(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const GraphRecipe* recipe);
  Decision ask(Candidate& candidate, Tape& tape);
  RegionsPlace ask_for_region(Candidate& candidate, const std::vector<std::shared_ptr<SavedStorage>>& inputs,
                              Tape& tape);
  void shrink_stash(Tape& tape, std::uint32_t ordinal);
  void enter_step(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const GraphRecipe* recipe,
                  const Candidate& candidate);
  void place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, Tape& tape, Start start);
  void check_window(std::uint64_t bytes) const;
  void warn_of_head(Tape& tape);
  void warn_if_host_memory_is_short();

  const Options options_;
  Residency residency_;
  StallStats stalls_at_reset_;  // LOCK: reset_mutex_
  std::mutex reset_mutex_;
  const std::unique_ptr<Planning> planning_;  // null without a budget
  Exclusions exclusions_;

  std::mutex policy_mutex_;  // policies are never called from two threads at once
  const bool policy_needs_operation_;
  const bool policy_needs_recompute_;
  const std::uint64_t least_bytes_;  // that the policy is asked about

  std::atomic<std::uint64_t> asked_system_{0};
  std::atomic<bool> warned_of_host_memory_{false};
  std::atomic<bool> warned_of_no_room_{false};
  std::atomic<bool> looked_for_head_{false};
};

}  // namespace ebb
