#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/Storage.h>

#include "offload/accounts/gauge.h"
#include "offload/accounts/ledger.h"
#include "offload/residency/device_holder.h"
#include "offload/residency/eviction_queue.h"
#include "offload/residency/prefetcher.h"
#include "offload/residency/stash.h"
#include "offload/stats.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"

namespace ebb {

// What all storages of one offloader share: the tier that their bytes go to, the limits of what the device may hold,
// and the counts. Residency knows nothing of policies nor of autograd.
//
// Threads: every member may be called from any thread.
class Residency {
 public:
  struct Config {
    bool record_timeline = false;
    void (*free_unused)() noexcept = nullptr;  // called before anything is evicted; null for none
  };

  // `prefetcher` must outlive this object. `trace`: the trace that was given to the tier; null for none.
  Residency(const Config& config, Prefetcher& prefetcher, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Throws c10::Error in a forked child, where no other member may be called.
  void check_process() const { process_.check("this offloader"); }
  [[nodiscard]] bool forked() const noexcept { return process_.forked(); }

  [[nodiscard]] Tier& tier() { return *tier_; }
  [[nodiscard]] const std::shared_ptr<Tier>& shared_tier() const { return tier_; }
  [[nodiscard]] Trace* trace() { return trace_.get(); }  // null for none
  [[nodiscard]] const Prefetcher& prefetcher() const { return prefetcher_; }
  [[nodiscard]] Ledger& ledger() { return ledger_; }
  [[nodiscard]] Stash& stash() { return stash_; }
  [[nodiscard]] Gauge& window() { return window_; }
  // Of sources that a prefetch keeps for backward, beside the window; bounded as the stash.
  [[nodiscard]] Gauge& retained() { return retained_; }
  [[nodiscard]] EvictionQueue& eviction_queue() { return eviction_queue_; }

  // The empty storage of tensors that only carry sizes and flags.
  [[nodiscard]] const c10::Storage& no_bytes() const { return no_bytes_; }

  // The counts and levels that Offloader::stats returns.
  [[nodiscard]] Stats stats();

  // Sets counts to zero and peaks to the present levels.
  void reset_stats();

  // From now on evict() asks this holder, too, as long as the holder lives.
  void set_holder(std::weak_ptr<DeviceHolder> holder);
  [[nodiscard]] bool has_holder() { return holder() != nullptr; }

  // How many bytes of the tier saved storages have; not those of the holder.
  [[nodiscard]] std::uint64_t offloaded_bytes();

  // How many bytes of device memory evict() could let go at most: those of saved storages and of the holder.
  [[nodiscard]] std::uint64_t evictable_bytes();

  // Lets go of at least `bytes` of device memory, as far as possible: first the stash is emptied, for whose copies the
  // streams wait, then unclaimed prefetches are cancelled, then the holder is asked, whose bytes mostly have a home
  // already, and then storages that the policy has kept are evicted. Returns how many bytes were let go. Waits for no
  // lock under which device memory is asked for, because the caller may hold the device allocator's lock. Does nothing
  // while the calling thread asks for memory to prefetch into: a prefetch must not displace bytes that backward needs
  // sooner.
  std::uint64_t evict(std::uint64_t bytes) noexcept;

  // Whether the calling thread asks for memory to prefetch into: whether a Prefetching lives on it.
  [[nodiscard]] static bool prefetches_here();

  // Marks the calling thread as asking for memory to prefetch into, as long as this object lives. May nest.
  class Prefetching {
   public:
    Prefetching();
    ~Prefetching();
    Prefetching(const Prefetching&) = delete;
    Prefetching& operator=(const Prefetching&) = delete;

   private:
    const bool before_;
  };

 private:
  [[nodiscard]] std::shared_ptr<DeviceHolder> holder();

  const ProcessMark process_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<Trace> trace_;
  const c10::Storage no_bytes_;
  Prefetcher& prefetcher_;
  void (*const free_unused_)() noexcept;
  Ledger ledger_;
  Mutex holder_mutex_;
  std::weak_ptr<DeviceHolder> holder_ EBB_GUARDED_BY(holder_mutex_);
  Mutex reset_mutex_;
  StallStats stalls_at_reset_ EBB_GUARDED_BY(reset_mutex_);
  Gauge window_;
  Gauge retained_;
  EvictionQueue eviction_queue_;
  Stash stash_;  // destroyed first: the stash lets go of device memory, which the gauges above count
};

}  // namespace ebb
