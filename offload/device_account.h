#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "offload/gauge.h"
#include "offload/timeline.h"

namespace ebb {

// What ebb holds in device memory, now and over time. Shared by all that is counted, which may outlive the Core: a
// tensor that was fetched can be saved again and then lies in the Core's own stash.
struct DeviceAccount {
  explicit DeviceAccount(bool record_timeline) : held(record_timeline ? &timeline : nullptr) {}

  // A lease that keeps what it counts in.
  class Held {
   public:
    Held(std::shared_ptr<DeviceAccount> account, std::uint64_t bytes)
        : account_(std::move(account)), lease_(account_->held.hold(bytes)) {}
    Held(Held&&) = default;
    Held& operator=(Held&&) = delete;  // would let go of the account before the lease

   private:
    std::shared_ptr<DeviceAccount> account_;  // destroyed last
    Gauge::Lease lease_;
  };

  Timeline timeline;
  Gauge held;
};

}  // namespace ebb
