#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "offload/residency/prefetchable.h"
#include "offload/steps/access_history.h"
#include "offload/steps/stall_monitor.h"
#include "offload/steps/step_limits.h"
#include "offload/steps/storage_table.h"
#include "offload/steps/thread_steps.h"

namespace ebb {

class SavedStep;

// The steps of one offloader: those of each thread, what is saved in them, and what finished ones teach the next.
//
// Threads: every member may be called from any thread.
class Steps final : public Prefetcher {
 public:
  struct Config {
    bool planned = false;                        // limits are as each step's plan has them
    std::optional<std::uint64_t> stash_bytes{};  // without a plan, as the next; nullopt: a share of what steps save
    std::optional<std::uint64_t> window_bytes{};
  };

  explicit Steps(const Config& config);
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // The step that saves made on this thread now belong to: its present one, or a new one if backward has begun on that.
  // The thread's earlier steps then give up what they have prefetched.
  [[nodiscard]] std::shared_ptr<SavedStep> of_this_thread();

  // How many of the calling thread's steps have a backward that has begun, and live.
  [[nodiscard]] std::size_t in_backward_here();

  void make_room(const std::function<bool()>& enough) override;

  [[nodiscard]] StorageTable& table() { return table_; }
  [[nodiscard]] const StepLimits& limits() const { return *limits_; }
  [[nodiscard]] AccessHistory& history() { return *history_; }
  [[nodiscard]] StallMonitor& stall_monitor() { return stall_monitor_; }

 private:
  const std::shared_ptr<AccessHistory> history_ = std::make_shared<AccessHistory>();
  StallMonitor stall_monitor_;
  const std::unique_ptr<const StepLimits> limits_;
  StorageTable table_;
  StepsOfThreads threads_;
};

}  // namespace ebb
