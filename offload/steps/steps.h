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

// The steps of one offloader, by thread; the storages that are saved in the steps; and what finished steps teach later
// steps.
//
// Threads: every member may be called from any thread.
class Steps final : public Prefetcher {
 public:
  struct Config {
    bool planned = false;                         // limits are those of each step's plan
    std::optional<std::uint64_t> stash_bytes{};   // without plans; nullopt: a share of the bytes that steps save
    std::optional<std::uint64_t> window_bytes{};  // without plans; nullopt: a share of the bytes that steps save
  };

  explicit Steps(const Config& config);
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // The step that saves on the calling thread now belong to: the thread's last step, or a new step if the last one has
  // ended or its backward has begun. When a new step begins outside of backward, the unclaimed prefetches of the
  // thread's earlier steps are cancelled.
  [[nodiscard]] std::shared_ptr<SavedStep> of_this_thread();

  // How many steps of the calling thread are alive and have a backward that has begun.
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
