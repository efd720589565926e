#include "offload/residency/fetched.h"

namespace ebb {

Fetched::Fetched(Tier& tier, c10::Storage storage, c10::Stream stream, std::shared_ptr<Gauge::Lease> on_device,
                 Gauge::Lease window)
    : tier_(tier),
      on_device_(std::move(on_device)),
      storage_(std::move(storage)),
      stream_(stream),
      window_(std::move(window)) {}

Fetched::~Fetched() {
  if (!waited_for_) {
    tier_.wait_or_block(WaitPoint::kUnusedAfterIn, stream_, arrived_);
  }
}

c10::Storage Fetched::get() {
  tier_.wait(WaitPoint::kUseAfterIn, stream_, arrived_);
  waited_for_ = true;
  if (arrived_ != nullptr) {
    tier_.used(stream_, storage_.data(), storage_.nbytes());
  }
  Gauge::Lease no_longer_in_window;  // destroyed after the lock is released
  {
    const MutexLock lock(mutex_);
    no_longer_in_window = std::move(window_);
  }
  return storage_;
}

}  // namespace ebb
