#include "offload/accounts/gauge.h"

#include "offload/accounts/timeline.h"

namespace ebb {

Gauge::Lease::~Lease() {
  if (gauge_ != nullptr) {
    gauge_->lower(bytes_);
  }
}

Gauge::Lease Gauge::hold(std::uint64_t bytes) {
  raised_to(now_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  return {this, bytes};
}

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

void Gauge::raised_to(std::uint64_t now) {
  raise_to(peak_, now);
  if (timeline_ != nullptr) {
    timeline_->sample(now);
  }
}

void Gauge::lower(std::uint64_t bytes) noexcept {
  const std::uint64_t now = now_.fetch_sub(bytes, std::memory_order_relaxed) - bytes;
  if (timeline_ != nullptr) {
    timeline_->sample(now);
  }
}

}  // namespace ebb
