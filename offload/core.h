#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Storage.h>

#include "offload/counters.h"
#include "offload/device_account.h"
#include "offload/evictable.h"
#include "offload/exclusions.h"
#include "offload/gauge.h"
#include "offload/options.h"
#include "offload/order_book.h"
#include "offload/planning.h"
#include "offload/saved_storage.h"
#include "offload/stall_watch.h"
#include "offload/stash.h"
#include "offload/storage_table.h"
#include "offload/tape.h"
#include "offload/thread_steps.h"
#include "streams/process_mark.h"
#include "streams/tier.h"
#include "streams/trace.h"

namespace ebb {

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

  // Throws c10::Error in a forked child, where no other member may be called.
  void check_process() const { process_.check("this offloader"); }
  [[nodiscard]] bool forked() const noexcept { return process_.forked(); }

  // The step that saves made on this thread now belong to: its present one, or a new one if backward has begun on that.
  // The thread's earlier steps then give up what they have fetched ahead.
  [[nodiscard]] std::shared_ptr<Tape> tape_of_this_thread();

  // Lets go of at least so much device memory, if it can: of sources whose copies out are under way, for which the
  // streams wait, of what was fetched ahead, and then of what the policy has kept. Returns how much it was. Waits for
  // no lock under which device memory is asked for: whoever calls this may hold the device allocator's. Nothing while
  // the calling thread asks for memory to fetch ahead: a guess must not cost what backward wants next.
  std::uint64_t evict(std::uint64_t bytes) noexcept;

  // The most that one request for device memory is expected to be: the largest storage that was saved so far, wherever
  // it stayed, or what was expected.
  [[nodiscard]] std::uint64_t largest_request_bytes() const { return largest_request_bytes_; }
  void expect_request(std::uint64_t bytes) { raise_to(largest_request_bytes_, bytes); }

  // Why a save of `tensor` is passed through; nullopt where its storage may move.
  [[nodiscard]] std::optional<Kept> passed_through(const at::Tensor& tensor);

  // A backward begins on this thread, probably on this step. With a plan, the streams wait for copies out as it says.
  // Returns whether the first copies in should start at once: never while another of the thread's steps is in use,
  // whose window they would take.
  [[nodiscard]] bool backward_begins(Tape& tape);
  void guessed_wrong() { stall_watch_.guessed_wrong(); }

  // It is over; `failed`: by an exception. A step that is recorded waits for the device here.
  void backward_is_over(Tape& tape, bool failed);

  [[nodiscard]] std::string explain();
  [[nodiscard]] std::optional<PlanReport> plan_report();

  // Whether sources that are kept for backward take no room in the window. Not if the user has set that.
  [[nodiscard]] bool sources_beside_window() const { return !options_.window_bytes && stall_watch_.steps_wait(); }

  // Counts a save that passes through. `tensor` need not have a storage.
  void count_kept(Kept reason, const at::Tensor& tensor);

  // Counts bytes of a save that is passed through as held on the device until the result is destroyed, which may be
  // after this.
  [[nodiscard]] DeviceAccount::Held hold_passed_through(std::uint64_t bytes) {
    using What = DeviceAccount::Held::What;
    return {account_, bytes, planning_ == nullptr ? What::kPassedThrough : What::kPassedThroughBesidePlan};
  }

  // Counts bytes as a storage's that is held on the device.
  [[nodiscard]] DeviceAccount::Held hold(std::uint64_t bytes) { return {account_, bytes}; }

  // Count storages, once it is certain what becomes of them.
  void count_offloaded(std::uint64_t bytes);
  void count_dropped(std::uint64_t bytes);
  void count_evicted(std::uint64_t bytes);
  void count_kept(Kept reason, std::uint64_t bytes);

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

  // The SavedStorage is being destroyed.
  void forget(const SavedStorage& saved) { table_.erase(saved.source_identity(), &saved); }

  // `memory` as a storage, counted as held on the device until nobody uses that.
  [[nodiscard]] c10::Storage counted(c10::DataPtr memory, std::size_t bytes);

  [[nodiscard]] const c10::Storage& no_bytes() const { return no_bytes_; }
  [[nodiscard]] Tier& tier() { return *tier_; }
  [[nodiscard]] Stash& stash() { return stash_; }
  [[nodiscard]] Gauge& window() { return window_; }
  [[nodiscard]] Gauge& retained() { return retained_; }  // sources that are kept for backward, bounded as the stash
  [[nodiscard]] Gauge& on_device() { return account_->held; }
  [[nodiscard]] Gauge& if_kept() { return account_->if_kept; }
  [[nodiscard]] std::uint64_t storages_on_device() const { return account_->storages_bytes(); }
  [[nodiscard]] Counters& counters() { return counters_; }
  [[nodiscard]] Exclusions& exclusions() { return exclusions_; }
  [[nodiscard]] Evictable& evictable() { return evictable_; }
  [[nodiscard]] Trace* trace() { return trace_.get(); }  // null for none
  [[nodiscard]] std::vector<TraceSpan> take_trace();
  [[nodiscard]] Timeline& timeline() { return account_->timeline; }
  [[nodiscard]] std::uint64_t stash_limit() const;

  // The same after the save of a step's storage: as its plan has it.
  [[nodiscard]] std::uint64_t stash_limit(Tape& tape, std::uint32_t ordinal) const;
  [[nodiscard]] std::uint64_t window_limit() const;

  [[nodiscard]] Stats stats();
  void log_summary() noexcept;  // at the Offloader's end
  void reset_stats();

 private:
  struct Decided {
    Decision decision;
    std::uint32_t ordinal;  // as Candidate::ordinal
  };
  Decided decide(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const Recipe* recipe);
  Decision ask(Candidate& candidate, Tape& tape);
  RegionsPlace ask_for_region(Candidate& candidate, const std::vector<at::Tensor>& inputs, Tape& tape);
  void shrink_stash(Tape& tape, std::uint32_t ordinal);
  void enter_step(const at::Tensor& tensor, SavedStorage& saved, Tape& tape, const Recipe* recipe,
                  const Candidate& candidate);
  void place(const std::shared_ptr<SavedStorage>& saved, const at::Tensor& tensor, Tape& tape, Start start);
  void check_window(std::uint64_t bytes) const;
  void warn_of_head(Tape& tape);
  void warn_if_host_memory_is_short();
  [[nodiscard]] std::uint64_t automatic_limit(std::uint64_t share_of_step) const;

  const ProcessMark process_;
  const Options options_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<Trace> trace_;
  const c10::Storage no_bytes_;  // stands for the bytes in tensors that only carry sizes and flags
  const std::shared_ptr<OrderBook> book_ = std::make_shared<OrderBook>();

  Counters counters_;
  StallStats stalls_at_reset_;  // LOCK: reset_mutex_
  std::mutex reset_mutex_;
  const std::shared_ptr<DeviceAccount> account_;
  Gauge window_;
  Gauge retained_;
  const std::unique_ptr<Planning> planning_;  // null without a budget
  StallWatch stall_watch_;
  Exclusions exclusions_;
  StorageTable table_;

  std::mutex policy_mutex_;  // policies are never called from two threads at once
  const bool policy_needs_operation_;
  const bool policy_needs_recompute_;
  const std::uint64_t least_bytes_;  // that the policy is asked about

  StepsOfThreads steps_;
  Evictable evictable_;

  std::atomic<std::uint64_t> largest_request_bytes_{0};
  std::atomic<std::uint64_t> asked_system_{0};
  std::atomic<bool> warned_of_host_memory_{false};
  std::atomic<bool> warned_of_no_room_{false};
  std::atomic<bool> warned_of_eviction_{false};
  std::atomic<bool> looked_for_head_{false};

  Stash stash_;  // last: it lets go of device memory, which the gauges above count
};

}  // namespace ebb
