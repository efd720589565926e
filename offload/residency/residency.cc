#include "offload/residency/residency.h"

#include <algorithm>
#include <utility>

#include "offload/base/log.h"
#include "offload/residency/tape.h"

namespace ebb {
namespace {

bool& fetching_ahead() {
  thread_local bool ahead = false;
  return ahead;
}

}  // namespace

bool Residency::fetches_ahead_here() { return fetching_ahead(); }

Residency::FetchingAhead::FetchingAhead() : before_(std::exchange(fetching_ahead(), true)) {}

Residency::FetchingAhead::~FetchingAhead() { fetching_ahead() = before_; }

Residency::Residency(const Config& config, std::shared_ptr<Tier> tier, std::shared_ptr<Trace> trace)
    : tier_(decorated(std::move(tier))),
      trace_(std::move(trace)),
      no_bytes_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, tier_->device())),
      bounds_(config.planned
                  ? std::unique_ptr<const Bounds>(std::make_unique<PlannedBounds>())
                  : std::make_unique<StepBounds>(config.stash_bytes, config.window_bytes, book_, stall_watch_)),
      free_unused_(config.free_unused),
      ledger_(config.record_timeline),
      stash_(*tier_) {}

std::uint64_t Residency::evict(std::uint64_t bytes) noexcept {
  if (fetching_ahead()) {
    return 0;
  }
  DeviceAccount& account = *ledger_.account();
  const std::uint64_t before = account.held.now_bytes();
  const auto gone = [&] { return before - std::min(before, account.held.now_bytes()); };
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
    for (const std::shared_ptr<ThreadSteps>& steps : steps_.all()) {
      for (const std::shared_ptr<Tape>& tape : steps->take_prefetching()) {
        tape->make_room(enough);
      }
    }
    evictable_.evict(enough);
  } catch (...) {
    log_warning("a tensor that was kept could not be moved to make room on the device");
  }
  return gone();
}

}  // namespace ebb
