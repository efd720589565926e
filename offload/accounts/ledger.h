#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "offload/accounts/counters.h"
#include "offload/accounts/device_account.h"
#include "offload/accounts/gauge.h"
#include "offload/stats.h"

namespace ebb {

// The counts of an offloader: the decision that each storage came to, and how many bytes ebb holds in device memory.
//
// Threads: every member may be called from any thread.
class Ledger {
 public:
  explicit Ledger(bool record_timeline) : account_(std::make_shared<DeviceAccount>(record_timeline)) {}

  [[nodiscard]] Counters& counters() { return counters_; }
  [[nodiscard]] const std::shared_ptr<DeviceAccount>& account() const { return account_; }
  [[nodiscard]] Gauge& on_device() { return account_->held; }
  [[nodiscard]] Gauge& if_kept() { return account_->if_kept; }
  [[nodiscard]] std::uint64_t on_device_as_saved() const { return account_->bytes_as_saved(); }

  // Count a storage, once it has been offloaded, dropped, evicted or kept.
  void count_offloaded(std::uint64_t bytes);
  void count_dropped(std::uint64_t bytes);
  void count_evicted(std::uint64_t bytes);
  void count_kept(KeptReason reason, std::uint64_t bytes);

  // The largest single request for device memory that is expected: the maximum of all calls of expect_request(), which
  // is called for every saved storage and for requests that have failed.
  [[nodiscard]] std::uint64_t largest_request_bytes() const { return largest_request_bytes_; }
  void expect_request(std::uint64_t bytes) { raise_to(largest_request_bytes_, bytes); }

  // Counts `bytes` as held on the device, until the result ends.
  [[nodiscard]] DeviceAccount::Held hold(std::uint64_t bytes, DeviceAccount::Held::What what) {
    return {account_, bytes, what};
  }

  // Makes `memory` a storage for tensors that the program gets. Its bytes are counted as held on the device until
  // nobody uses the storage.
  //
  // Note [The allocator's own memory]
  // LibTorch knows its memory by the deleter: CUDACachingAllocator::recordStream silently ignores a DataPtr with any
  // other deleter, and the program's side stream then reads memory that has been given to somebody else. So the DataPtr
  // is handed on as the allocator made it, and the lease that counts the bytes is a member of the storage. The storage
  // can be resized, as a storage that LibTorch makes.
  [[nodiscard]] c10::Storage counted(c10::DataPtr memory, std::size_t bytes, DeviceAccount::Held::What what);

 private:
  Counters counters_;
  const std::shared_ptr<DeviceAccount> account_;
  std::atomic<std::uint64_t> largest_request_bytes_{0};
  std::atomic<bool> warned_of_eviction_{false};
};

}  // namespace ebb
