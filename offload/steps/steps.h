#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "offload/residency/prefetcher.h"
#include "offload/steps/access_history.h"
#include "offload/steps/stall_monitor.h"
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
    // Limits are those of each step's plan. A step without one takes the least memory: stash and window hold one
    // storage at a time.
    bool planned = false;
    std::optional<std::uint64_t> stash_bytes{};   // without plans; nullopt: a share of the bytes that steps save
    std::optional<std::uint64_t> window_bytes{};  // without plans; nullopt: a share of the bytes that steps save
  };

  explicit Steps(const Config& config) : config_(config) {}
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  // The step that saves on the calling thread now belong to: the thread's last step, or a new step if the last one has
  // ended or its backward has begun. When a new step begins outside of backward, the unclaimed prefetches of the
  // thread's earlier steps are cancelled.
  [[nodiscard]] std::shared_ptr<SavedStep> of_this_thread();

  // How many steps of the calling thread are alive and have a backward that has begun.
  [[nodiscard]] std::size_t in_backward_here();

  [[nodiscard]] std::uint64_t stash_limit() const override;
  [[nodiscard]] std::uint64_t window_limit() const override;
  [[nodiscard]] bool sources_beside_window() const override;
  void make_room(const std::function<bool()>& enough) override;

  // The limit of the stash after the save of a step's storage. `ordinal`: as Candidate::ordinal.
  [[nodiscard]] std::uint64_t stash_limit_after(SavedStep& step, std::uint32_t ordinal) const;

  [[nodiscard]] StorageTable& table() { return table_; }
  [[nodiscard]] AccessHistory& history() { return *history_; }
  [[nodiscard]] StallMonitor& stall_monitor() { return stall_monitor_; }

 private:
  [[nodiscard]] std::uint64_t share(std::uint64_t of_step) const;

  const Config config_;
  const std::shared_ptr<AccessHistory> history_ = std::make_shared<AccessHistory>();
  StallMonitor stall_monitor_;
  StorageTable table_;
  StepsOfThreads threads_;
};

}  // namespace ebb
