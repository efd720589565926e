#include "offload/cache/residency.h"

#include <algorithm>
#include <utility>

namespace ebb {
Residency::Residency(bool record_timeline, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace)
    : tier_(decorated(std::move(tier))),
      trace_(std::move(trace)),
      no_bytes_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tier_->device())),
      ledger_(record_timeline),
      stash_(*tier_) {}

Stats Residency::stats() {
  stash_.sweep();  // the sources of finished copies are not held
  const Counters& counters = ledger_.counters();
  const DeviceAccount& account = *ledger_.account();
  const Gauge& stash = stash_.gauge();
  Stats stats;
  stats.saved = counters.saved.count();
  stats.offloaded = counters.offloaded.count();
  stats.dropped = counters.dropped.count();
  stats.evicted = counters.evicted.count();
  stats.deduplicated = counters.deduplicated.count();
  std::transform(counters.kept.begin(), counters.kept.end(), stats.kept.begin(),
                 [](const Counter& counter) { return counter.count(); });
  stats.fetched = counters.fetched.count();
  stats.recomputed = counters.recomputed.count();
  stats.reused = counters.reused.count();
  stats.still_held = counters.still_held.count();
  stats.managed_prefetched = counters.managed_prefetched.count();
  stats.managed_fetched_late = counters.managed_fetched_late.count();
  stats.managed_evicted = counters.managed_evicted.count();
  stats.steps = counters.steps;
  const StallStats stalls = tier_->stall_stats();
  stats.stalls = stalls.count - stalls_at_reset_;
  stats.stalled_ms = stalls.total_ms - stalled_ms_at_reset_;
  const PoolStats pool = tier_->pool_stats();
  stats.pool = {pool.now_bytes, pool.peak_bytes, pool.capacity_bytes};
  stats.pool_growths = pool.growths;
  stats.stash = {stash.now_bytes(), stash.peak_bytes(), 0};
  stats.window = {window_.now_bytes(), window_.peak_bytes(), 0};
  stats.saved_on_device = {account.held.now_bytes(), account.held.peak_bytes(), 0};
  stats.saved_if_kept = {account.if_kept.now_bytes(), account.if_kept.peak_bytes(), 0};
  stats.managed_on_device = {managed_on_device_.now_bytes(), managed_on_device_.peak_bytes(), 0};
  stats.managed_resident = {managed_resident_.now_bytes(), managed_resident_.peak_bytes(), 0};
  return stats;
}

void Residency::reset_stats() {
  ledger_.counters().reset();
  stash_.gauge().reset_peak();
  window_.reset_peak();
  managed_on_device_.reset_peak();
  managed_resident_.reset_peak();
  ledger_.on_device().reset_peak();
  ledger_.if_kept().reset_peak();
  const StallStats stalls = tier_->stall_stats();
  stalls_at_reset_ = stalls.count;
  stalled_ms_at_reset_ = stalls.total_ms;
}

}  // namespace ebb
