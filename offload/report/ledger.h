#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "offload/report/counters.h"
#include "offload/report/device_account.h"
#include "offload/report/gauge.h"
#include "offload/stats.h"

namespace ebb {

// What an offloader counts: what became of storages, and how many bytes ebb holds in device memory.
//
// Threads: every member may be called from any thread.
class Ledger {
 public:
  explicit Ledger(bool record_timeline) : account_(std::make_shared<DeviceAccount>(record_timeline)) {}

  [[nodiscard]] Counters& counters() { return counters_; }
  [[nodiscard]] const std::shared_ptr<DeviceAccount>& account() const { return account_; }
  [[nodiscard]] Gauge& on_device() { return account_->held; }
  [[nodiscard]] Gauge& if_kept() { return account_->if_kept; }
  [[nodiscard]] std::uint64_t storages_on_device() const { return account_->storages_bytes(); }

  // Count storages, once it is certain what becomes of them.
  void count_offloaded(std::uint64_t bytes);
  void count_dropped(std::uint64_t bytes);
  void count_evicted(std::uint64_t bytes);
  void count_kept(KeptReason reason, std::uint64_t bytes);

  // The most that one request for device memory is expected to be: the largest storage that was saved so far, wherever
  // it stayed, or what was expected.
  [[nodiscard]] std::uint64_t largest_request_bytes() const { return largest_request_bytes_; }
  void expect_request(std::uint64_t bytes) { raise_to(largest_request_bytes_, bytes); }

  // Counts bytes as a storage's that is held on the device.
  [[nodiscard]] DeviceAccount::Held hold(std::uint64_t bytes) { return {account_, bytes}; }

  // `memory` as a storage, counted as held on the device until nobody uses that.
  [[nodiscard]] c10::Storage counted(c10::DataPtr memory, std::size_t bytes);

 private:
  Counters counters_;
  const std::shared_ptr<DeviceAccount> account_;
  std::atomic<std::uint64_t> largest_request_bytes_{0};
  std::atomic<bool> warned_of_eviction_{false};
};

}  // namespace ebb
