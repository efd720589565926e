#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <c10/core/Storage.h>

#include "offload/accounts/gauge.h"
#include "offload/accounts/ledger.h"
#include "offload/cache/stash.h"
#include "offload/stats.h"
#include "streams/base/process_mark.h"
#include "streams/base/tier.h"
#include "streams/base/trace.h"

namespace ebb {

// What all saved storages of one offloader share: the tier that their bytes go to, the memory whose copies out are
// under way, and the counts. Residency knows no storage.
//
// Threads: every member may be called from any thread.
class Residency {
 public:
  // `trace`: the trace that was given to the tier; null for none.
  Residency(bool record_timeline, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Throws c10::Error in a forked child, where no other member may be called.
  void check_process() const { process_.check("this offloader"); }
  [[nodiscard]] bool forked() const noexcept { return process_.forked(); }

  [[nodiscard]] Tier& tier() { return *tier_; }
  [[nodiscard]] const std::shared_ptr<Tier>& shared_tier() const { return tier_; }
  [[nodiscard]] Trace* trace() { return trace_.get(); }  // null for none
  [[nodiscard]] Ledger& ledger() { return ledger_; }
  [[nodiscard]] Stash& stash() { return stash_; }
  [[nodiscard]] Gauge& window() { return window_; }
  // Of managed storages, which come and go: the bytes of the tier, those that take device memory, and of these, the
  // bytes that stay for good.
  [[nodiscard]] Gauge& managed_homes() { return managed_homes_; }
  [[nodiscard]] Gauge& managed_on_device() { return managed_on_device_; }
  [[nodiscard]] Gauge& managed_resident() { return managed_resident_; }
  // Of sources that a prefetch keeps for backward, beside the window; bounded as the stash.
  [[nodiscard]] Gauge& retained() { return retained_; }

  // The empty storage of tensors that only carry sizes and flags.
  [[nodiscard]] const c10::Storage& no_bytes() const { return no_bytes_; }

  // The counts and levels that Offloader::stats returns, without the bounds, and without what is managed now.
  [[nodiscard]] Stats stats();

  // Sets counts to zero and peaks to the present levels.
  void reset_stats();

 private:
  const ProcessMark process_;
  const std::shared_ptr<Tier> tier_;
  const std::shared_ptr<Trace> trace_;
  const c10::Storage no_bytes_;
  Ledger ledger_;
  std::atomic<std::uint64_t> stalls_at_reset_{0};
  std::atomic<double> stalled_ms_at_reset_{0};
  Gauge window_;
  Gauge retained_;
  Gauge managed_homes_;
  Gauge managed_on_device_;
  Gauge managed_resident_;
  Stash stash_;  // destroyed first: the stash lets go of device memory, which the gauges above count
};

// Marks the calling thread as asking for device memory to prefetch into, as long as the object lives. A prefetch must
// not displace bytes that backward needs sooner, so nothing is evicted for it. May nest.
class Prefetching {
 public:
  Prefetching() : before_(std::exchange(is_here_, true)) {}
  ~Prefetching() { is_here_ = before_; }
  Prefetching(const Prefetching&) = delete;
  Prefetching& operator=(const Prefetching&) = delete;

  [[nodiscard]] static bool is_here() { return is_here_; }

 private:
  static inline thread_local bool is_here_ = false;
  const bool before_;
};

}  // namespace ebb
