#include "offload/accounts/gauge.h"

#include "offload/accounts/timeline.h"

namespace ebb {

bool Gauge::try_hold(std::uint64_t bytes, std::uint64_t limit, Lease& lease) {
  std::uint64_t now = now_bytes();
  do {
    if (now != 0 && now + bytes > limit) {
      return false;
    }
  } while (!now_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  raised_to(now + bytes);
  lease = Lease(this, bytes);
  return true;
}

void Gauge::add_to_timeline(std::uint64_t now) noexcept { timeline_->sample(now); }

}  // namespace ebb
