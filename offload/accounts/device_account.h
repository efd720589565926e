#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "offload/accounts/gauge.h"
#include "offload/accounts/timeline.h"

namespace ebb {

// How many bytes ebb holds in device memory, now and over time. All counted storages share the account, because a
// storage may outlive its Residency: a tensor that one offloader has fetched can be saved again with another offloader
// and is then in the other's stash.
struct DeviceAccount {
  explicit DeviceAccount(bool record_timeline) : held(record_timeline ? &timeline : nullptr) {}

  // The held bytes of storages that may leave the device: all held bytes but those of saves that are passed through.
  [[nodiscard]] std::uint64_t storages_bytes() const {
    const std::uint64_t passed = passed_through.now_bytes();
    return std::max(held.now_bytes(), passed) - passed;
  }

  // Of these, the bytes that no recipe and no second run of a region has made.
  [[nodiscard]] std::uint64_t bytes_as_saved() const {
    const std::uint64_t made = recomputed.now_bytes();
    return std::max(storages_bytes(), made) - made;
  }

  // A lease of the account's gauges that keeps the account alive.
  class Held {
   public:
    enum class What : std::uint8_t { kAsSaved, kRecomputed, kPassedThrough, kPassedThroughBesidePlan };
    Held(std::shared_ptr<DeviceAccount> account, std::uint64_t bytes, What what)
        : account_(std::move(account)), lease_(account_->held.hold(bytes)) {
      if (what == What::kPassedThrough || what == What::kPassedThroughBesidePlan) {
        if_kept_ = account_->if_kept.hold(bytes);
      }
      if (what == What::kPassedThroughBesidePlan) {
        among_ = account_->passed_through.hold(bytes);
      } else if (what == What::kRecomputed) {
        among_ = account_->recomputed.hold(bytes);
      }
    }
    Held(Held&&) = default;
    Held& operator=(Held&&) = delete;  // a default assignment would let go of the account before the lease

   private:
    std::shared_ptr<DeviceAccount> account_;  // destroyed last
    Gauge::Lease lease_;
    Gauge::Lease if_kept_;
    Gauge::Lease among_;  // of passed_through or recomputed
  };

  Timeline timeline;
  Gauge held;
  Gauge if_kept;         // Stats::saved_if_kept
  Gauge passed_through;  // the part of `held` that is passed through; counted only where a plan needs the figure
  Gauge recomputed;      // the part of `held` that recipes and second runs of regions have made

  // How often the device had no memory left and ebb was asked to let go of memory. A step in which that happens gives
  // no record.
  std::atomic<std::uint64_t> evictions{0};
};

}  // namespace ebb
