#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "offload/steps/access_history.h"
#include "offload/steps/eviction_queue.h"
#include "offload/steps/saved_step.h"
#include "offload/steps/stall_monitor.h"
#include "offload/steps/storage_table.h"
#include "streams/base/mutex.h"

namespace ebb {

// The steps of one offloader, by thread; the storages that are saved in the steps; and what finished steps teach later
// steps.
//
// Threads: every member may be called from any thread.
class Steps {
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

  // The limit of the stash, and of the window: of bytes that have been prefetched.
  [[nodiscard]] std::uint64_t stash_limit() const;
  [[nodiscard]] std::uint64_t window_limit() const;

  // Whether a source that a prefetch keeps for backward takes no room in the window.
  [[nodiscard]] bool sources_beside_window() const;

  // Cancels the unclaimed copies that a step has prefetched, except a copy that another thread is just about to use. A
  // backward that covers only a part of a graph leaves such copies behind, and a graph that lives on would hold the
  // window with them, which all steps share.
  void cancel_prefetches(const std::shared_ptr<SavedStep>& step) { cancel(eviction_queue_.take_copies_of(step)); }

  // Let go of device memory until `enough` returns true or no more can go. make_room() cancels unclaimed copies of all
  // steps, the copy that was started last first; for the rest of their backward pass these steps prefetch only the
  // storage that is needed next, because copies would be cancelled again and again. evict() copies out storages that
  // the policy has kept, the first saved first, and passes over those that cannot be. Both wait for no lock under which
  // device memory is asked for, because the caller may hold the device allocator's lock.
  void make_room(const std::function<bool()>& enough);
  void evict(const std::function<bool()>& enough);

  // The limit of the stash after the save of a step's storage. `ordinal`: as Candidate::ordinal.
  [[nodiscard]] std::uint64_t stash_limit_after(SavedStep& step, std::uint32_t ordinal) const;

  [[nodiscard]] StorageTable& table() { return table_; }
  [[nodiscard]] EvictionQueue& eviction_queue() { return eviction_queue_; }
  [[nodiscard]] AccessHistory& history() { return *history_; }
  [[nodiscard]] StallMonitor& stall_monitor() { return stall_monitor_; }

 private:
  // Of a thread that saves.
  struct OfThread {
    std::shared_ptr<BackwardCount> in_backward = std::make_shared<BackwardCount>(0);
    std::weak_ptr<SavedStep> last = {};  // the step that was begun last
  };

  static void cancel(const std::vector<EvictionQueue::Copy>& copies, bool device_is_full = false);
  [[nodiscard]] OfThread& here_locked() EBB_REQUIRES(mutex_);
  [[nodiscard]] std::uint64_t share(std::uint64_t of_step) const;

  const Config config_;
  const std::shared_ptr<AccessHistory> history_ = std::make_shared<AccessHistory>();
  StallMonitor stall_monitor_;
  StorageTable table_;
  EvictionQueue eviction_queue_;
  Mutex mutex_;
  // Graphs whose backward is over may stay alive by the thousand, so a thread knows its last step alone.
  std::unordered_map<std::thread::id, OfThread> threads_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 64;  // threads end, and their entries stay
};

}  // namespace ebb
