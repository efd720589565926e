#include "offload/accounts/timeline.h"

#include <utility>

#include "offload/base/backward_pass.h"

namespace ebb {

void Timeline::sample(std::uint64_t saved_on_device) noexcept {
  if (process_.forked()) {
    return;
  }
  const bool backward = in_backward();
  const MutexLock lock(mutex_);
  if (samples_.size() >= kMaxSamples) {
    return;
  }
  const std::chrono::duration<double, std::milli> since = Clock::now() - start_;
  try {
    samples_.push_back({since.count(), saved_on_device, backward});
  } catch (...) {  // no host memory left: the sample is left out
  }
}

std::vector<TimelineSample> Timeline::take() {
  const MutexLock lock(mutex_);
  start_ = Clock::now();
  return std::exchange(samples_, {});
}

}  // namespace ebb
