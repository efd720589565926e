#include "offload/residency/residency.h"

#include <algorithm>
#include <utility>

#include "offload/base/log.h"

namespace ebb {
namespace {

thread_local bool prefetching = false;

}  // namespace

bool Residency::prefetches_here() { return prefetching; }

Residency::Prefetching::Prefetching() : before_(std::exchange(prefetching, true)) {}

Residency::Prefetching::~Prefetching() { prefetching = before_; }

Residency::Residency(const Config& config, Prefetcher& prefetcher, std::shared_ptr<Tier> tier,
                     std::shared_ptr<Trace> trace)
    : tier_(decorated(std::move(tier))),
      trace_(std::move(trace)),
      no_bytes_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tier_->device())),
      prefetcher_(prefetcher),
      free_unused_(config.free_unused),
      ledger_(config.record_timeline),
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
  stats.steps = counters.steps;
  {
    const MutexLock lock(reset_mutex_);
    const StallStats stalls = tier_->stall_stats();
    stats.stalls = stalls.count - stalls_at_reset_.count;
    stats.stalled_ms = stalls.total_ms - stalls_at_reset_.total_ms;
  }
  const PoolStats pool = tier_->pool_stats();
  stats.pool = {pool.now_bytes, pool.peak_bytes, pool.capacity_bytes};
  stats.pool_growths = pool.growths;
  stats.stash = {stash.now_bytes(), stash.peak_bytes(), prefetcher_.stash_limit()};
  stats.window = {window_.now_bytes(), window_.peak_bytes(), prefetcher_.window_limit()};
  stats.saved_on_device = {account.held.now_bytes(), account.held.peak_bytes(), 0};
  stats.saved_if_kept = {account.if_kept.now_bytes(), account.if_kept.peak_bytes(), 0};
  return stats;
}

void Residency::reset_stats() {
  ledger_.counters().reset();
  stash_.gauge().reset_peak();
  window_.reset_peak();
  ledger_.on_device().reset_peak();
  ledger_.if_kept().reset_peak();
  const MutexLock lock(reset_mutex_);
  stalls_at_reset_ = tier_->stall_stats();
}

void Residency::set_holder(std::weak_ptr<DeviceHolder> holder) {
  const MutexLock lock(holder_mutex_);
  holder_ = std::move(holder);
}

std::shared_ptr<DeviceHolder> Residency::holder() {
  const MutexLock lock(holder_mutex_);
  return holder_.lock();
}

std::uint64_t Residency::offloaded_bytes() {
  const std::shared_ptr<DeviceHolder> holder = this->holder();
  const std::uint64_t homes = holder == nullptr ? 0 : holder->home_bytes();
  const std::uint64_t leased = tier().pool_stats().now_bytes;
  return leased - std::min(leased, homes);
}

std::uint64_t Residency::evictable_bytes() {
  const std::shared_ptr<DeviceHolder> holder = this->holder();
  return ledger_.storages_on_device() + (holder == nullptr ? 0 : holder->held_bytes());
}

std::uint64_t Residency::evict(std::uint64_t bytes) noexcept {
  if (prefetching) {
    return 0;
  }
  DeviceAccount& account = *ledger_.account();
  const std::shared_ptr<DeviceHolder> holder = this->holder();
  const auto held = [&] { return account.held.now_bytes() + (holder == nullptr ? 0 : holder->held_bytes()); };
  const std::uint64_t before = held();
  const auto gone = [&] { return before - std::min(before, held()); };
  const auto enough = [&] { return gone() >= bytes; };
  try {
    if (free_unused_ != nullptr) {
      free_unused_();
    }
    stash_.drain();
    if (enough()) {
      return gone();
    }
    ++account.evictions;
    prefetcher_.make_room(enough);
    if (holder != nullptr) {
      holder->let_go(enough);
    }
    eviction_queue_.evict(enough);
  } catch (...) {
    log_warning("a tensor that was kept could not be moved to make room on the device");
  }
  return gone();
}

}  // namespace ebb
